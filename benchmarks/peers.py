"""The peers, one small class each, called as their own documentation says.

A peer is imported when it is made, so that no import is ever timed. Each gets the settings it
needs to be good on one node without an accelerator; docs/benchmarks.md says which and why.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from .states import Flat, State, copy_into


class Handle(Protocol):
    """A save under way."""

    def wait(self) -> None:
        """Return when the peer itself calls the save finished."""


class Finished:
    """The save was over when it returned."""

    def wait(self) -> None:
        return


class Promised:
    """The save is over when the future is."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Called:
    """The save is over when the call returns."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def wait(self) -> None:
        self._call()


class Peer(ABC):
    """A way to save and load the state of one process; a directory for each step."""

    name: ClassVar[str]
    state: Any
    directory: Path

    def prepare(self, state: Any, directory: Path) -> None:
        """Once, untimed: whatever the peer lets a program do before its first save."""
        self.state = state
        self.directory = directory

    @abstractmethod
    def save(self, step: int) -> Handle:
        """When this returns, training may change every tensor."""

    @abstractmethod
    def load(self, step: int) -> None:
        """When this returns, the state holds what was saved."""

    def path(self, step: int) -> Path:
        """Everything the save of this step has written."""
        return self.directory / f"step-{step:06}"

    def file(self, step: int, name: str) -> Path:
        return self.path(step) / name

    def close(self) -> None:
        return


class TorchSave(Peer):
    name = "torch.save"
    state: State

    def save(self, step: int) -> Handle:
        self.path(step).mkdir()
        torch.save(self.state.nested(), self.file(step, "state.pt"))
        return Finished()

    def load(self, step: int) -> None:
        self.state.adopt(torch.load(self.file(step, "state.pt"), weights_only=True))


class Safetensors(Peer):
    name = "safetensors"
    state: Flat

    def __init__(self) -> None:
        from safetensors import torch as safetensors

        self._io = safetensors

    def save(self, step: int) -> Handle:
        self.path(step).mkdir()
        self._io.save_file(self.state.flat(), self.file(step, "state.safetensors"))
        return Finished()

    def load(self, step: int) -> None:
        copy_into(self.state.flat(), self._io.load_file(self.file(step, "state.safetensors")))


class Distributed(Peer):
    """torch.distributed.checkpoint in a group of one process."""

    state: Flat
    threads = 2

    def __init__(self) -> None:
        from torch import distributed
        from torch.distributed import checkpoint

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._group: Any = distributed
        self._dcp: Any = checkpoint

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        self._group.init_process_group("gloo", store=self._group.HashStore(), rank=0, world_size=1)

    def load(self, step: int) -> None:
        self._dcp.load(self.state.flat(), checkpoint_id=self.path(step))

    def close(self) -> None:
        self._group.destroy_process_group()

    def _writer(self, step: int) -> Any:
        return self._dcp.FileSystemWriter(self.path(step), thread_count=self.threads)

    def _stager(self, *, shared: bool) -> Any:
        """Only the options that need no accelerator."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )


class DistributedSave(Distributed):
    name = "dcp.save"

    def save(self, step: int) -> Handle:
        self._dcp.save(self.state.flat(), storage_writer=self._writer(step))
        return Finished()


class DistributedThread(Distributed):
    name = "dcp.async_save thread"

    def save(self, step: int) -> Handle:
        return Promised(self._dcp.async_save(self.state.flat(), storage_writer=self._writer(step)))


class DistributedStaged(Distributed):
    name = "dcp.async_save DefaultStager"

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        self._stage = self._stager(shared=True)
        self._planner = self._dcp.DefaultSavePlanner(enable_plan_caching=True)

    def save(self, step: int) -> Handle:
        return Promised(
            self._dcp.async_save(
                self.state.flat(),
                storage_writer=self._writer(step),
                planner=self._planner,
                async_stager=self._stage,
            )
        )

    def close(self) -> None:
        self._stage.close()
        super().close()


class DistributedProcess(Distributed):
    name = "dcp.async_save process"

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._kind = AsyncCheckpointerType.PROCESS
        self._stage = self._stager(shared=True)

    def save(self, step: int) -> Handle:
        return Promised(
            self._dcp.async_save(
                self.state.flat(),
                storage_writer=self._writer(step),
                async_checkpointer_type=self._kind,
                async_stager=self._stage,
            )
        )

    def close(self) -> None:
        self._stage.close()
        super().close()


class SnapshotTake(Peer):
    name = "torchsnapshot.take"
    state: Flat

    def __init__(self) -> None:
        import torchsnapshot

        self._torchsnapshot = torchsnapshot

    def save(self, step: int) -> Handle:
        self._torchsnapshot.Snapshot.take(str(self.path(step)), self._app())
        return Finished()

    def load(self, step: int) -> None:
        app = self._app()
        self._torchsnapshot.Snapshot(str(self.path(step))).restore(app)
        copy_into(self.state.flat(), _others(self.state.flat(), app["state"]))

    def _app(self) -> dict[str, Any]:
        return {"state": self._torchsnapshot.StateDict(**self.state.flat())}


class SnapshotAsync(SnapshotTake):
    name = "torchsnapshot.async_take"

    def save(self, step: int) -> Handle:
        pending = self._torchsnapshot.Snapshot.async_take(str(self.path(step)), self._app())
        return Called(pending.wait)


class LightningAsync(Peer):
    name = "lightning AsyncCheckpointIO"
    state: State

    def __init__(self) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, step: int) -> Handle:
        self._io.save_checkpoint(self.state.nested(), self.file(step, "state.ckpt"))
        return Called(self._io.teardown)

    def load(self, step: int) -> None:
        self.state.adopt(self._io.load_checkpoint(self.file(step, "state.ckpt"), weights_only=True))


class OrbaxAsync(Peer):
    name = "orbax AsyncCheckpointer"
    state: Flat

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import orbax.checkpoint as orbax

        self._orbax = orbax

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        self._checkpointer = self._orbax.AsyncCheckpointer(self._orbax.StandardCheckpointHandler())

    def save(self, step: int) -> Handle:
        self._checkpointer.save(self.path(step), args=self._orbax.args.StandardSave(self._arrays()))
        return Called(self._checkpointer.wait_until_finished)

    def load(self, step: int) -> None:
        wanted = self._orbax.args.StandardRestore(self._arrays())
        copy_into(self.state.flat(), self._checkpointer.restore(self.path(step), args=wanted))

    def close(self) -> None:
        self._checkpointer.close()

    def _arrays(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.state.flat().items()}


class TorchCheckpointing(Peer):
    """Without direct I/O, which fails on an unaligned tail."""

    name = "torch_checkpointing sync"
    state: Flat

    def __init__(self) -> None:
        import torch_checkpointing
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._package = torch_checkpointing
        self._storage = LocalFileSystemStorageConfig(use_direct_io=False)

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        self._manager = self._package.CheckpointManager.Config(
            save=self._saving(), storage_config=self._storage
        ).build()

    def save(self, step: int) -> Handle:
        self._manager.save(str(self.path(step)), self._payload())
        return Finished()

    def load(self, step: int) -> None:
        wanted = self._payload()
        loaded = self._manager.load(self.path(step), into=wanted)
        copy_into(self.state.flat(), _others(self.state.flat(), loaded["state"]))

    def close(self) -> None:
        self._manager.close()

    def _payload(self) -> dict[str, Any]:
        return {"state": self.state.flat()}

    def _saving(self) -> Any:
        return self._package.SyncCheckpointSaverConfig()


class TorchCheckpointingAsync(TorchCheckpointing):
    """It copies in a thread and makes optimizer.step() wait at a lock: that wait is blocking."""

    name = "torch_checkpointing async"

    def prepare(self, state: Any, directory: Path) -> None:
        super().prepare(state, directory)
        self._manager.prewarm_staging(self._payload())

    def save(self, step: int) -> Handle:
        future = self._manager.save(str(self.path(step)), self._payload())
        with self._manager.lock():
            pass
        return Promised(future)

    def _saving(self) -> Any:
        staging = self._package.CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False
        )
        return self._package.AsyncCheckpointSaverConfig(staging_config=staging)


def _others(wanted: dict[str, torch.Tensor], loaded: Any) -> dict[str, Any]:
    """What a peer gave back instead of filling it in place, all names known."""
    return {name: loaded[name] for name in wanted}


PEERS: tuple[type[Peer], ...] = (
    TorchSave,
    Safetensors,
    DistributedSave,
    DistributedThread,
    DistributedStaged,
    DistributedProcess,
    SnapshotTake,
    SnapshotAsync,
    LightningAsync,
    OrbaxAsync,
    TorchCheckpointing,
    TorchCheckpointingAsync,
)
BY_NAME = {peer.name: peer for peer in PEERS}
