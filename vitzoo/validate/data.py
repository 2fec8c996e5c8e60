"""The validation images of a model, with its own class indices as labels."""

from collections.abc import Callable

from timm.data import ImageNetInfo, infer_imagenet_subset

from vitzoo.classes import label_names, number_rest
from vitzoo.data import Images, open_dataset
from vitzoo.data.dataset import merge_options
from vitzoo.data.options import NO_OPTIONS, DataOptions
from vitzoo.errors import UserError
from vitzoo.load import LoadedModel


def open_validation_data(
    data_dir: str, loaded: LoadedModel, transform: Callable | None = None, options: DataOptions = NO_OPTIONS
) -> Images:
    """Open the validation split, with the model's class indices as labels.

    If the run that trained the model held out images of this dataset, these are the validation split. Its data options
    are used if `options` does not have others.

    Classes are matched by name if the model knows its class names: those it was trained on, or ImageNet's WordNet ids,
    of which the data may have a subset. Otherwise the class folders in natural order are the classes.

    Raises:
        UserError: The classes of the data are not the model's.
    """
    model = loaded.model
    if not model.num_classes:
        raise UserError(f'{loaded.name} has no classifier to be scored; use --ignore-labels')
    about = loaded.about
    settings = {key: about[key] for key in ('multi_label', 'held_out') if key in about}
    options = merge_options(options, about, data_dir)
    dataset = open_dataset(data_dir, 'val', transform, options=options, **settings)
    class_names = label_names(model)
    if not class_names:
        subset = infer_imagenet_subset(model)
        class_names = ImageNetInfo(subset).label_names() if subset else []
        if not set(dataset.class_names) <= set(class_names):
            class_names = []
    if class_names:
        class_to_idx = {name: i for i, name in enumerate(class_names)}
        try:
            Images(dataset.reader, transform, class_to_idx)
        except UserError as error:
            if data_dir == 'sample':
                raise _not_of_sample(loaded.name) from error
            raise UserError(f'{loaded.name} does not fit the data: {error}') from error
        # after the check, so that no class of the data is taken for one that has only a number
        all_names = number_rest(class_names, model.num_classes)
        return Images(dataset.reader, transform, {name: i for i, name in enumerate(all_names)})
    if len(dataset.class_names) != model.num_classes:
        if data_dir == 'sample':
            raise _not_of_sample(loaded.name)
        raise UserError(
            f'{loaded.name} has {model.num_classes} classes and {data_dir} has {len(dataset.class_names)}, which are '
            f"not ImageNet's WordNet ids ({', '.join(dataset.class_names[:3])}, …); validate a model trained on these "
            'classes: the folder of its run, or --num-classes with --checkpoint'
        )
    return dataset


def _not_of_sample(name: str) -> UserError:
    return UserError(
        f'{name} has other classes than the bundled sample, on which a model is validated without --data-dir; give its'
        f' data as --data-dir'
    )
