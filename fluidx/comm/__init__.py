"""How ranks talk: one protocol, with threads of this process, processes that share memory, or NCCL behind it."""

from .base import CommAborted, CommError, CommTimeout, Communicator
from .threads.communicator import ThreadCommunicator
from .threads.world import ThreadWorld

__all__ = ["CommAborted", "CommError", "CommTimeout", "Communicator", "ThreadCommunicator", "ThreadWorld"]
