"""Nystromformer: softmax attention through landmarks and an iterative pseudo-inverse.

    out = softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v

q~ and k~ are the means of m consecutive segments of tokens, whose lengths differ by one at most (nothing is padded),
and pinv iterates Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. Linear in the number of tokens: O(N m dim). Prefix
tokens are ordinary tokens. With a landmark for every token, and an inverse that has converged, it is softmax attention.
Nystromformer, https://arxiv.org/abs/2102.03902, equation 13 and section "Moore-Penrose inverse computation"
"""

import torch

from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['Nystrom', 'iterative_pinv', 'nystrom_attention', 'nystrom_naive', 'segment_means']


def segment_means(x: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Means of consecutive segments of tokens, the longer segments first: (B, heads, N, d) -> (B, heads, m, d)."""
    B, heads, N, d = x.shape
    size, longer = divmod(N, num_segments)
    head, tail = x.split([longer * (size + 1), (num_segments - longer) * size], dim=2)
    head = head.reshape(B, heads, longer, size + 1, d).mean(dim=3)
    tail = tail.reshape(B, heads, num_segments - longer, size, d).mean(dim=3)
    return torch.cat([head, tail], dim=2)


def iterative_pinv(a: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """Moore-Penrose inverse of row-stochastic matrices (..., m, m), each started from its own norms."""
    norms = a.sum(dim=-2).amax(dim=-1) * a.sum(dim=-1).amax(dim=-1)
    z = a.transpose(-2, -1) / norms[..., None, None]
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    for _ in range(num_iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def nystrom_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_landmarks: int, num_iterations: int, scale: float
) -> torch.Tensor:
    """The whole N x N approximation, then the values; arguments as `nystrom_attention`."""
    N = q.shape[2]
    m = min(num_landmarks, N)
    sizes = [N // m + (i < N % m) for i in range(m)]
    q_land, k_land = (torch.stack([segment.mean(dim=2) for segment in x.split(sizes, dim=2)], dim=2) for x in (q, k))
    left = (scale * q @ k_land.mT).softmax(dim=-1)
    middle = (scale * q_land @ k_land.mT).softmax(dim=-1)
    right = (scale * q_land @ k.mT).softmax(dim=-1)
    return left @ iterative_pinv(middle, num_iterations) @ right @ v


def nystrom_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_landmarks: int, num_iterations: int, scale: float
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider: the inverse does not survive half
    precision."""
    with no_autocast(q):
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v_wide = scale * q.to(dtype), k.to(dtype), v.to(dtype)
        m = min(num_landmarks, q.shape[2])
        q_land, k_land = segment_means(q, m), segment_means(k, m)
        middle = (q_land @ k_land.mT).softmax(dim=-1)
        context = (q_land @ k.mT).softmax(dim=-1) @ v_wide  # (B, heads, m, d)
        context = iterative_pinv(middle, num_iterations) @ context
        return ((q @ k_land.mT).softmax(dim=-1) @ context).to(v.dtype)


@register_mixer('nystrom')
class Nystrom(QKVMixer):
    """Nystrom attention with `num_landmarks` landmarks and `num_iterations` steps of the pseudo-inverse."""

    approximates_softmax = True
    op = staticmethod(nystrom_attention)
    op_naive = staticmethod(nystrom_naive)

    def __init__(self, dim: int, num_heads: int, *, num_landmarks: int = 64, num_iterations: int = 6, **kwargs) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if num_landmarks < 1 or num_iterations < 1:
            raise ValueError(
                f'nystrom needs num_landmarks and num_iterations of at least 1, '
                f'not {num_landmarks} and {num_iterations}.'
            )
        self.num_landmarks = num_landmarks
        self.num_iterations = num_iterations

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.num_landmarks, self.num_iterations, self.scale)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """With `pinv_residual`, |A Z A - A| / |A| of the landmarks' matrix A and its iterated inverse Z, over heads."""
        signs = super().health(q, k, v, grid_size)
        with no_autocast(q):
            dtype = torch.promote_types(q.dtype, torch.float32)
            m = min(self.num_landmarks, q.shape[2])
            q_land, k_land = (segment_means(x.to(dtype), m) for x in (q, k))
            a = (self.scale * q_land @ k_land.mT).softmax(dim=-1)
            residual = a @ iterative_pinv(a, self.num_iterations) @ a - a
            share = torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(a)
        return {**signs, 'pinv_residual': share.mean(dim=1)}
