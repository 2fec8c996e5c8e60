"""Token mixers. Importing this package registers all of them."""

from .aft import AFTConv, AFTFull, AFTLocal, AFTSimple
from .base import QKVMixer, TokenMixer, create_mixer, list_mixers, mixer_class, register_mixer
from .bigbird import BigBird
from .fourier import Fourier
from .global_memory import GlobalMemory
from .hydra import Hydra
from .linear import Linear
from .linformer import Linformer
from .local import Local
from .longformer import Longformer
from .ls import LongShort
from .nystrom import Nystrom
from .performer import Performer
from .pool import Pool
from .reformer import Reformer
from .rfa import RFA
from .routing import Routing
from .set import InducedSet
from .sinkhorn import Sinkhorn
from .softmax import Softmax
from .sparse import Sparse
from .srformer import SRFormer
from .synthesizer import Synthesizer
from .xca import XCA
