"""The files of tiny studies with every kind of way and of evaluation."""

import json
from pathlib import Path

import yaml
from tiny import CLASSES, MakeOnce, make_model

TINY = dict(depth=1, embed_dim=24, num_heads=2, patch_size=8)
TRAIN = dict(epochs=2, batch_size=8, warmup_epochs=0, lr=1e-3, workers=0, img_size=32, model_kwargs=TINY)
TRANSFER = dict(steps=2, network_steps=2, evals=1, eval_images=4, batch_size=8, lr=1e-3, workers=0)
TRANSFER |= dict(no_random_control=True, sizes=[], network_lr=1e-4)
TEACHER, FIRST, SECOND = 'deit_softmax_nano', 'deit_linear_nano', 'deit_linformer_nano'
EVALUATIONS = {
    'plain': dict(clean={}),
    'corrupt': dict(clean={}, corrupt=dict(corrupt=True)),
    'measures': dict(clean=dict(measures=['cosine', 'effective_rank']), health=dict(health=True)),
    'precision': dict(clean={}, half=dict(amp_dtype='bfloat16')),
    'other data': dict(clean={}, other=dict(data_dir='other')),
    # by all ways; by ways that have no other evaluation in common with their teachers; by none but the first way
    'size': dict(clean={}, larger=dict(img_size='32x48')),
    'chosen': dict(clean={}, larger=dict(img_size=[48, 48])),
    'apart': dict(clean={}, larger=dict(img_size=48)),
}


def make_study(row: dict[str, str], data_dir: str, make_once: MakeOnce) -> dict:
    """The content of the file of the study of a row."""
    train, transfer = dict(TRAIN, data_dir=data_dir), dict(TRANSFER, data_dir=data_dir)
    evaluations = {
        name: dict(workers=0, batch_size=8, data_dir=data_dir) | options
        for name, options in EVALUATIONS[row['evaluations']].items()
    }
    if row['data of'] == 'study':
        for options in (train, transfer, *evaluations.values()):
            if options['data_dir'] == data_dir:
                del options['data_dir']
    train |= dict(in_chans=1) if row['channels'] == 'grey' else {}
    train |= dict(multi_label=True) if row['data'] == 'labels' else {}
    if row['config'] == 'yes':
        train['config'], transfer['config'] = 'recipe.yaml', 'transfer.yaml'
        del train['lr'], transfer['network_steps']
    transfer |= dict(img_size=48) if row['sizes'] == 'different' else {}
    if row['ways'] in ('converted', 'shared teacher'):
        ways, names, pattern = make_conversions(row, train, transfer), [TEACHER], 'deit_sof*_nano'
    else:
        ways, names, pattern = make_trainings(row, train, make_once), [FIRST], 'deit_line*_nano'
        if row['ways'] == 'two models':
            names, pattern = [FIRST, SECOND], 'deit_lin*_nano'
    models = pattern if row['names'] == 'wildcard' else names
    study = dict(output='out', data_dir=data_dir if row['data of'] == 'study' else 'nowhere', evaluations=evaluations)
    study |= dict(seeds=[0, 3] if row['seeds'] == 'two' else 3, ways=ways, models=models)
    if row['names'] == 'own':
        study['models'], next(iter(ways.values()))['models'] = 'aft_conv_nano', models
    if row['baseline'] != 'none':
        study['baseline'] = names[0] if row['baseline'] == 'name' else {pattern: names[0]}
    for number, way in enumerate(ways.values()):
        chosen = dict(chosen=['larger', 'clean'], apart='clean').get(row['evaluations'])
        if chosen is not None:
            way['evaluations'] = ['larger'] if number else chosen
    return study


def make_trainings(row: dict[str, str], train: dict, make_once: MakeOnce) -> dict:
    """The only way of a row without conversions."""
    overrides = dict(none={}, option=dict(lr=3e-3), kwargs=dict(model_kwargs=dict(embed_dim=36, num_heads=3)))
    way = dict(train=train, overrides={'*_lin*': overrides[row['overrides']]})
    if row['sizes'] == 'different':
        way['overrides']['*_linf*' if row['ways'] == 'two models' else '*_linear_*'] = dict(img_size=48)
    if row['ways'] != 'distilled':
        return dict(scratch=way)
    source = make_once(make_model, 'deit_softmax', tuple(CLASSES), train.get('in_chans', 3), False)
    way['train'] = dict(train, kd_model_name=str(source), kd_distill_type='hard')
    return dict(distilled=way)


def make_conversions(row: dict[str, str], train: dict, transfer: dict) -> dict:
    """A teacher, and one or two ways that convert it."""
    overrides = dict(none={}, option=dict(lr=3e-3), kwargs=dict(mixer_kwargs=dict(qkv_bias=False)))
    shared = dict(teacher=TEACHER, teacher_way='teacher', overrides={'lin*ar': overrides[row['overrides']]})
    mixers = 'line*' if row['names'] == 'wildcard' else ['linear', 'linformer']
    ways = dict(teacher=dict(train=train))
    ways['converted'] = dict(shared, transfer=transfer, mixers=mixers if row['ways'] == 'converted' else 'linear')
    if row['ways'] == 'shared teacher':
        ways['shorter'] = dict(shared, transfer=dict(transfer, steps=1), mixers='linear')
    return ways


def make_earlier(row: dict[str, str], study: dict) -> dict:
    """The study before the change of a row."""
    study = json.loads(json.dumps(study))
    ways, evaluations, change = study['ways'], study['evaluations'], row['change']
    if change == 'seed':
        study['seeds'] = 0
    elif change == 'evaluation' and len(evaluations) > 1:
        evaluations.popitem()
        for way in ways.values():
            way.pop('evaluations', None)
    elif change == 'way' and len(ways) > 1:
        ways.popitem()
    elif change == 'model' and row['ways'] == 'two models':
        ways['scratch']['models'] = FIRST
        ways['scratch']['overrides'].pop('*_linf*', None)
    elif change == 'model' and isinstance(ways.get('converted', {}).get('mixers'), list):
        ways['converted']['mixers'] = 'linear'
    return study


def write_folder(study: dict, folder: Path, data: str = '', other: str = '') -> None:
    """The folder in which a study is run: its file, recipes, and links to the data, which may be missing."""
    folder.mkdir(exist_ok=True)
    (folder / 'study.yaml').write_text(yaml.safe_dump(study, sort_keys=False))
    # the choices of the study, and its own options, take precedence over these
    (folder / 'recipe.yaml').write_text(yaml.safe_dump(dict(TRAIN, epochs=7, model=SECOND, seed=9, lr=2e-3)))
    (folder / 'transfer.yaml').write_text(yaml.safe_dump(dict(TRANSFER, steps=9, mixer='pool')))
    for name, target in {Path(link_name(data)).name: data.removeprefix('wds/'), 'other': other}.items():
        if data and not (folder / name).exists():
            (folder / name).symlink_to(target)


def link_name(data: str) -> str:
    """The --data-dir within the folder of a study."""
    prefix, suffix = 'wds/' if data.startswith('wds/') else '', '.tar' if data.endswith('.tar') else ''
    return f'{prefix}images{suffix}'
