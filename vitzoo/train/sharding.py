"""Settings of FSDP: the layers of a model that it shards, its optimizers, and the recipes that it cannot train."""

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from vitzoo.errors import UserError
from vitzoo.train.recipe import Recipe

# timm's optimizers that train sharded weights as whole ones; the others stop, hang, or treat a shard as a whole matrix
SHARDABLE = (
    'adabelief', 'adadelta', 'adagrad', 'adam', 'adamax', 'adamc', 'adamw', 'adamwlegacy', 'adan', 'adanw',
    'adopt', 'adoptc', 'adoptw', 'lamb', 'lambc', 'lambcd', 'lambcw', 'lambw', 'laprop', 'lapropc', 'larc', 'lars',
    'lion', 'lionc', 'madgrad', 'madgradw', 'momentum', 'nadam', 'nadamc', 'nadamlegacy', 'nadamw', 'nesterov',
    'nesterovw', 'nlarc', 'nlars', 'radabelief', 'radam', 'radamlegacy', 'radamw', 'rmsprop', 'rmsproptf',
    'rmsproptfc', 'rmsproptfw', 'sgd', 'sgdc', 'sgdw',
)  # fmt: skip


def prepare_plugin(recipe: Recipe, accelerator: Accelerator) -> None:
    """Adjust the settings that the launcher has for FSDP.

    Raises:
        UserError: It is FSDP 1, or the recipe cannot be trained with FSDP.
    """
    if not accelerator.is_fsdp2:
        raise UserError('FSDP version 1 is not supported; launch with --use_fsdp --fsdp_version 2')
    if recipe.clip_grad and recipe.clip_mode == 'agc':
        raise UserError('clip_mode agc does not work with FSDP, because it needs norms of whole weights; use norm')
    if recipe.opt.lower() not in SHARDABLE:
        raise UserError(
            f'opt {recipe.opt} does not work with FSDP; choose another opt, such as adamw, lamb, lion or sgd'
        )
    # all processes have the initial weights, and Accelerate cannot distribute those of the model itself and its buffers
    accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False


def prepare_optimizer(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """With FSDP, let an optimizer of timm update one tensor after the other.

    On a GPU its default are functions of many tensors at once, such as torch._foreach_lerp, some of which do not exist
    for sharded tensors. Those that torch's own optimizers use do.
    """
    if not accelerator.is_fsdp2 or not type(optimizer).__module__.startswith('timm.'):
        return

    def update_single_tensors(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if 'foreach' in group:
                group['foreach'] = False

    update_single_tensors(optimizer)
    # a checkpoint has the choice of the run that wrote it
    optimizer.register_load_state_dict_post_hook(update_single_tensors)


def choose_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Let FSDP shard the layers of this model that the launcher names, by default the blocks with attention.

    A name stands for the classes derived from it, too, such as a block of timm with another mixer.

    Raises:
        UserError: No layer has one of the names.
    """
    plugin, modules = accelerator.state.fsdp_plugin, list(model.modules())
    blocks = {type(module) for module in modules if isinstance(getattr(module, 'attn', None), nn.Module)}
    # containers of attention layers contain other layers elsewhere
    chosen = {kind for kind in blocks if not kind.__module__.startswith('torch.')}
    names = plugin.transformer_cls_names_to_wrap
    if names is not None:
        found = {name.strip(): _classes_of(name.strip(), modules) for name in names}
        missing = next((name for name in found if not found[name]), None)
        if missing is not None:
            others = ', '.join(sorted(kind.__name__ for kind in chosen)) or 'none'
            raise UserError(
                f"the model has no layers of the class '{missing}', its blocks with attention being {others}; leave out"
                f' --fsdp_transformer_layer_cls_to_wrap to shard these'
            )
        chosen = set().union(*found.values())
    plugin.transformer_cls_names_to_wrap = sorted({kind.__name__ for kind in chosen})


def _classes_of(name: str, modules: list[nn.Module]) -> set[type]:
    return {type(module) for module in modules if name in {kind.__name__ for kind in type(module).__mro__}}
