"""Options that say how a dataset is laid out, if its splits, columns or classes have other names than usual."""

from dataclasses import asdict, dataclass

from vitzoo.errors import UserError

# as the name of a split: the dataset is not divided, so that a folder called train may be a class
UNDIVIDED = '.'


@dataclass(frozen=True)
class DataOptions:
    """The options of a dataset, named after those of timm; None finds the name in the data.

    Attributes:
        train_split: Name of the training split; '.' if the dataset is not divided into splits.
        val_split: Name of the validation split; '.' as above.
        input_key: Column of the images in a Hugging Face dataset; their suffix in WebDataset shards.
        target_key: Column of the labels in a Hugging Face dataset; suffix of their file, or key in the .json file, in
            WebDataset shards.
        data_subset: Subset (configuration) of a Hugging Face dataset.
        class_map: A file for `read_class_map`, or the mapping that it returns.

    Raises:
        UserError: The names of the splits contradict each other.
    """

    train_split: str | None = None
    val_split: str | None = None
    input_key: str | None = None
    target_key: str | None = None
    data_subset: str | None = None
    class_map: str | dict[str, str] | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.train_split, self.val_split) if name is not None]
        if UNDIVIDED in names and set(names) != {UNDIVIDED}:
            raise UserError(
                f"train_split '{self.train_split}' and val_split '{self.val_split}' contradict each other:"
                f" '{UNDIVIDED}' stands for data that is not divided; give one of them"
            )
        if len(names) == 2 and names[0] == names[1] != UNDIVIDED:
            raise UserError(f"train_split and val_split are both '{names[0]}'; validate on other images")

    @property
    def is_undivided(self) -> bool:
        """True if the dataset is not divided into splits."""
        return UNDIVIDED in (self.train_split, self.val_split)

    def split_name(self, split: str) -> str | None:
        """The name given to 'train' or 'val'."""
        return {'train': self.train_split, 'val': self.val_split}.get(split)

    def given(self) -> dict:
        """The options that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_OPTIONS = DataOptions()
DATA_OPTIONS = tuple(asdict(NO_OPTIONS))
