"""Token mixers. Importing this package registers all of them."""

from .aft import AFTConv, AFTFull, AFTLocal, AFTSimple
from .base import QKVMixer, TokenMixer, create_mixer, list_mixers, mixer_class, register_mixer
from .longformer import Longformer
from .ls import LongShort
from .nystrom import Nystrom
from .performer import Performer
from .softmax import Softmax
