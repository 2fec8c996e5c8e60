"""The command that made a model, and its options, by the files in the folder of the model."""


def find_command(recipe: dict) -> str:
    """'train' or 'transfer' by the options in a recipe; empty if there are none, as of a model of `vitzoo convert`."""
    if 'mixer' in recipe and 'model' not in recipe:
        # a transfer names its teacher outside of the options
        return 'transfer'
    return 'train' if recipe else ''


def transfer_recipe(settings: dict) -> dict:
    """The options of `vitzoo transfer`, in a form for --config, of the settings that it recorded."""
    others = ('teacher', 'training_images', 'validation_images', 'data_options', 'random_control', 'training')
    options = {key: value for key, value in settings.items() if key not in others and value not in (None, {})}
    options |= settings['data_options'] | settings.get('training', {})
    return options | dict(no_random_control=not settings['random_control'])
