"""The only package that touches transformers' model internals."""

from kvboost_rag.model.adapters import unwrapped
from kvboost_rag.model.architecture import Architecture
from kvboost_rag.model.batch import Row, can_share, forward_rows
from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.fingerprint import fingerprint
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.masks import Columns
from kvboost_rag.model.plain import PlainSession
from kvboost_rag.model.rotation import Rotation, Tables
from kvboost_rag.model.runner import ModelRunner
from kvboost_rag.model.spare import SpareMemory
from kvboost_rag.model.steering import Chooser, Probe
from kvboost_rag.model.support import check_build, check_support
from kvboost_rag.model.watch import WeightsState, WeightsWatch

__all__ = [
    "Architecture",
    "Chooser",
    "Columns",
    "KVCache",
    "ModelRunner",
    "PlainSession",
    "Probe",
    "Rotation",
    "Row",
    "SpareMemory",
    "Tables",
    "WeightsState",
    "WeightsWatch",
    "can_share",
    "check_build",
    "check_support",
    "fingerprint",
    "forward_rows",
    "model_lock",
    "unwrapped",
]
