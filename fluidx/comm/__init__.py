"""Communication between ranks: one protocol, implemented for threads, for processes that share memory, for MPI and for NCCL."""

from .base import CommAborted, CommError, CommTimeout, Communicator
from .threads.communicator import ThreadCommunicator
from .threads.world import ThreadWorld

__all__ = ["CommAborted", "CommError", "CommTimeout", "Communicator", "ThreadCommunicator", "ThreadWorld"]
