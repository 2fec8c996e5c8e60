"""Health of approximate softmax attention: its error in a model, on images, and the causes of it.

A mixer that approximates softmax attention reports signs of failure (`QKVMixer.health`): the relative error against
exact attention of the same queries, keys and values, features at their numerical floor, an inverse that has not
converged. They are measured per image, so that their means do not depend on the batch size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitzoo._modes import restored_modes
from vitzoo.errors import UserError
from vitzoo.mixers import QKVMixer


def health(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Measure the signs of each approximating mixer, averaged over a batch of images: {mixer: {sign: mean}}.

    The model is evaluated in eval mode. Mixers are named after their modules (`blocks.0.attn`).

    Raises:
        UserError: No mixer of the model approximates softmax attention.
    """
    with restored_modes(model), torch.no_grad(), HealthProbe(model.eval()) as probe:
        model(images)
    return probe.report()


class HealthProbe:
    """Hooks the approximating mixers of a model while the context is open, and measures every image.

    The model must be in eval mode. Each mixer is run a second time and compared with exact attention.

    Args:
        model: The raw model, not a wrapper.

    Raises:
        UserError: No mixer of the model approximates softmax attention.
    """

    key = 'health'

    def __init__(self, model: nn.Module) -> None:
        mixers = {name: module for name, module in model.named_modules() if isinstance(module, QKVMixer)}
        self.mixers = {name: mixer for name, mixer in mixers.items() if mixer.approximates_softmax}
        if not self.mixers:
            raise UserError(
                f'no health to report: no mixer of this {type(model).__name__} approximates softmax attention'
            )
        self._values: dict[tuple[str, str], list[Tensor]] = {}

    def __enter__(self) -> 'HealthProbe':
        self._hooks = [mixer.register_forward_pre_hook(self._measurer(name)) for name, mixer in self.mixers.items()]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def names(self) -> list[tuple[str, str]]:
        """The (mixer, sign) of each column; empty before the first image."""
        return list(self._values)

    def per_image(self) -> Tensor:
        """Return and clear the values since the last call: (images, columns), in the order of the images."""
        columns = [torch.cat(values) if values else torch.empty(0) for values in self._values.values()]
        self._values = {name: [] for name in self._values}
        return torch.stack(columns, dim=1)

    def report(self, means: list[float] | None = None) -> dict[str, dict[str, float]]:
        """Nest the means of the columns as {mixer: {sign: mean}}; by default the means since the last call.

        Raises:
            UserError: There are no means, and the model has seen no images since the last call.
        """
        if means is None:
            if not any(self._values.values()):
                raise UserError('no health to report: the model has seen no images since the last report')
            # some devices have no float64
            means = self.per_image().cpu().double().mean(dim=0).tolist()
        signs: dict[str, dict[str, float]] = {mixer: {} for mixer in self.mixers}
        for (mixer, sign), mean in zip(self.names, means, strict=True):
            signs[mixer][sign] = mean
        return signs

    def _measurer(self, name: str) -> Callable[[QKVMixer, tuple], None]:
        @torch.no_grad()
        def measure(mixer: QKVMixer, args: tuple) -> None:
            grid_size = args[1]
            for sign, values in mixer.health(*mixer.to_qkv(*args), grid_size).items():
                self._values.setdefault((name, sign), []).append(values)

        return measure
