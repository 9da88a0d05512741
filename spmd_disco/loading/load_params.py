"""What a session does with parameters in files."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import registry
from ..dref import DRef
from ..files.sources import ParamFiles, open_params
from ..session_part import SessionPart
from ..worker import Failed
from .progress import Progress
from .reading import PREFIX, fingerprint
from .saving import save
from .shard_info import (
    Placement,
    ShardStep,
    parse_shard_info,
    placement,
    presharded,
    shard_name,
    split_name,
)

__all__ = ["ParamMethods"]

#: Seconds after which the workers are waited for: then failures are known, and the bar is right.
BETWEEN_SYNCS = 0.2

#: What `Session.load_params` takes for one parameter, and for all of them.
Spec = int | str | Sequence[Any] | None
Chooser = Callable[[str, tuple[int, ...], np.dtype[Any]], Spec]
ShardInfo = Mapping[str, Spec] | Chooser | str | None


class ParamMethods(SessionPart):
    """Parameters from files onto the workers, and back."""

    def load_params(
        self,
        path: str | os.PathLike[str],
        shard_info: ShardInfo = None,
        in_group: bool = True,
        progress: bool | None = None,
    ) -> dict[str, DRef]:
        """Load parameters from files, each worker its own part. A sync point.

        A worker reads the bytes of its own parts and no others, straight into the array. Where a
        parameter is replicated, the workers of a node share one read-only copy, as with `share`,
        which the first of them reads. Only shard functions see a whole parameter of those that are
        split: worker 0, or the first worker of each group, applies them and scatters the result.

        All workers open the files themselves: these have to be there on all nodes, by one path.

        Parameters
        ----------
        path : path-like
            A folder with a tensor cache of TVM (``tensor-cache.json`` or ``ndarray-cache.json``) or
            with ``model.safetensors`` or its index; or a file: ``.safetensors``, an index of these,
            ``.npz``, ``.npy``, or one that TVM's ``save_param_dict`` or ``save_tensor`` wrote.
        shard_info : dict, callable or str, optional
            By parameter, what becomes of it; all that it leaves out are replicated.

            * an axis, which may count from the end: an equal part for each worker;
            * ``"replicate"`` or None;
            * a list ``[[function, [shape, dtype], *extra], …]``, TVM's form: the functions are
              called in order as ``f(input, *extra, output)`` with `output` allocated as said, and
              the first dimension of the last one is split. A function is the name of a global
              function, or a callable.

            A callable is asked ``shard_info(name, shape, dtype)`` for each parameter. A str is
            TVM's JSON.
        in_group : bool
            Whether each group loads its own copy, split among its workers; else all workers of the
            session share one.
        progress : bool, optional
            Whether to show a bar on standard error. Default: where that is a terminal.

        Returns
        -------
        dict
            By parameter in the order of the file, a DRef. Parameters of a presharded cache,
            ``NAME_shard-I-of-N``, come as ``NAME``, with part I on worker I − 1 of its group.

        Raises
        ------
        ValueError, TypeError, OSError
            The files cannot be read, `shard_info` does not fit them, or the number of workers fits
            neither; nothing has been sent.
        WorkerError
            It failed on a worker: a file is missing there or differs, a shard function raised, or
            memory is short.
        """
        controller = self._controller
        controller.check()
        path = os.path.abspath(os.fspath(path))
        if not isinstance(path, str):
            raise TypeError(f"the path of parameters is a str or path-like, not {path!r}")
        in_group = bool(in_group)
        with open_params(path) as files:
            plan = self._plan(files, shard_info, in_group)
            expected = fingerprint(files)
        functions = self._functions(plan)
        memory = controller.worker.memory
        if memory is not None:
            with controller.lock:
                memory.take_back([controller.worker.finished, *controller.channel.executed()])
        loaded: dict[str, DRef] = {}
        opened = [self._call(PREFIX + "open", (path, expected), {})]
        try:
            self.sync()
            with Progress("loading", sum(item.nbytes for item in plan), progress) as bar:
                self._load_all(opened, plan, functions, in_group, loaded, bar)
        except BaseException:
            # They hold much memory, and the error's traceback holds whatever is still here.
            loaded.clear()
            opened.clear()
            raise
        return loaded

    def _load_all(
        self,
        opened: Sequence[DRef],
        plan: Sequence[_Item],
        functions: Mapping[str, DRef],
        in_group: bool,
        loaded: dict[str, DRef],
        bar: Progress,
    ) -> None:
        """Load what the plan says into `loaded`, and wait for it."""
        registers = self._controller.worker.registers
        # What is read ahead is what is read next: no worker reads two things at a time.
        following = {
            item.name: later.name
            for item, later in itertools.pairwise(plan)
            if isinstance(later.placement, tuple)
        }
        waiting, last = 0, time.monotonic()
        for item in plan:
            name = item.name
            loaded[name] = self._load(opened[0], item, functions, following.get(name), in_group)
            waiting += item.nbytes
            # What has failed need not be gone on with.
            failed = type(registers.get(loaded[name].reg_id)) is Failed
            if failed or time.monotonic() - last >= BETWEEN_SYNCS:
                self.sync()
                bar.advance(waiting)
                waiting, last = 0, time.monotonic()
        self.sync()
        bar.advance(waiting)

    def save_params(
        self,
        folder: str | os.PathLike[str],
        drefs: Mapping[str, DRef],
        in_group: bool = True,
        metadata: Mapping[str, Any] | None = None,
        shard_cap_mb: float = 32,
        progress: bool | None = None,
    ) -> None:
        """Save what the workers have of parameters as a presharded tensor cache. A sync point.

        Each worker writes its own data files. The index is written last, when all of them are
        there. `load_params` reads it with as many workers, and so do the functions
        ``runtime.disco.ShardLoaderLoadPresharded`` and, where the parameters are called
        ``param_0``, ``param_1``, …, ``…LoadAllPresharded`` here and in TVM.

        Parameters
        ----------
        folder : path-like
            One for all nodes; it is made if it is not there. An older cache in it is replaced.
        drefs : dict
            By name, arrays of any shape and of a dtype that TVM has. A part is saved as
            ``NAME_shard-I-of-N``.
        in_group : bool
            Whether the groups have copies of the same parameters: those of the first are saved, and
            the others' are compared with them. Else those of all workers are.
        metadata : dict, optional
            Goes into the index.
        shard_cap_mb : float
            The size of a data file, in MiB, that only a single larger array exceeds.
        progress : bool, optional
            See `load_params`.

        Raises
        ------
        ValueError, TypeError
            Wrong names or arguments; or with `in_group` the groups' parameters differ.
        WorkerError
            What a worker has makes no array (numbers and lists do), or one of a dtype that TVM has
            not; or it could not write.
        DiscoError, OSError
            The folder is not the same one for all workers; the index cannot be written.
        """
        save(self, folder, drefs, bool(in_group), metadata, shard_cap_mb, progress)

    def _load(
        self,
        opened: DRef,
        item: _Item,
        functions: Mapping[str, DRef],
        following: str | None,
        in_group: bool,
    ) -> DRef:
        """Send the command that loads one parameter."""
        if item.parts:
            return self._call(PREFIX + "presharded", (opened, item.name, item.parts), {})
        if item.placement is None:
            return self._call(PREFIX + "replicated", (opened, item.name), {})
        parts = self.group_size if in_group else self.num_workers
        if isinstance(item.placement, int):
            return self._call(PREFIX + "slice", (opened, item.name, item.placement, parts), {})
        steps = item.placement
        called = [functions.get(s.function, s.function) for s in steps]
        # A function goes once, not also in the description of its step.
        described = [(_name(s), s.shape, s.dtype, s.extra) for s in steps]
        args = (opened, item.name, called, described, in_group, following)
        return self._call(PREFIX + "chain", args, {})

    def _functions(self, plan: Sequence[_Item]) -> dict[str, DRef]:
        """Have all workers look up the shard functions, which may be the program's own."""
        names = {
            step.function
            for item in plan
            if isinstance(item.placement, tuple)
            for step in item.placement
            if isinstance(step.function, str)
        }
        return {name: self.get_global_func(name) for name in sorted(names)}

    def _plan(
        self,
        files: ParamFiles,
        shard_info: ShardInfo,
        in_group: bool,
    ) -> list[_Item]:
        """Decide what becomes of each parameter, before anything is sent."""
        parts = self.group_size if in_group else self.num_workers
        among = f"the {parts} worker{'s' * (parts != 1)}"
        if in_group and self.num_groups > 1:
            among += " of each group"
        cut = presharded(files)
        choose = _chooser(shard_info, files, cut)
        plan: dict[str, _Item] = {}
        for name, source in files.items():
            parsed = split_name(name)
            if parsed is None:
                shape = tuple(source.shape)
                spec = placement(name, shape, choose(name, shape, source.dtype), parts, among)
                _check_functions(name, spec)
                plan[name] = _Item(name, spec, 0, source.nbytes)
                continue
            base, _, number = parsed
            if number != parts:
                other = number == (self.num_workers if in_group else self.group_size)
                raise ValueError(
                    f"parameter {base!r} is cut into {number} shards ({name!r}), and is to be "
                    f"loaded by {among}: "
                    + (
                        f"give in_group={not in_group}"
                        if other
                        else f"open a session with {number} workers, or load what it was made of"
                    )
                )
            if base not in plan:
                nbytes = sum(files[shard_name(base, i, number)].nbytes for i in range(number))
                plan[base] = _Item(base, None, number, nbytes)
        return list(plan.values())


class _Item(NamedTuple):
    """What becomes of one parameter."""

    name: str
    placement: Placement
    #: The number of its parts, where the files have it cut up already; else 0.
    parts: int
    nbytes: int


def _name(step: ShardStep) -> str:
    function = step.function
    return function if isinstance(function, str) else getattr(function, "__name__", repr(function))


def _chooser(shard_info: ShardInfo, files: ParamFiles, cut: Mapping[str, int]) -> Chooser:
    """Return what says what becomes of a parameter."""
    if isinstance(shard_info, str):
        shard_info = parse_shard_info(shard_info)
    if shard_info is None:
        shard_info = {}
    if isinstance(shard_info, Mapping):
        unknown = [name for name in shard_info if name not in files or name in cut]
        if unknown:
            name = unknown[0]
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            if name in cut:
                raise ValueError(
                    f"shard_info says how to split {name!r}{more}, which the files have in "
                    f"{cut[name]} shards already: leave it out"
                )
            known = ", ".join(map(repr, [*files][:8])) + (", …" if len(files) > 8 else "")
            raise ValueError(
                f"shard_info has {name!r}{more}, and there is no such parameter: there are {known}"
            )
        table = shard_info
        return lambda name, shape, dtype: table.get(name)
    if not callable(shard_info):
        raise TypeError(
            "shard_info is a dict by parameter, a callable, TVM's JSON or None, not "
            f"{type(shard_info).__name__}"
        )
    return shard_info


def _check_functions(name: str, spec: Placement) -> None:
    """Refuse names that no global function has."""
    for step in spec if isinstance(spec, tuple) else ():
        function = step.function
        if isinstance(function, str) and registry.get_global_func(function, True) is None:
            raise ValueError(
                f"parameter {name!r}: no global function {function!r} is registered, which its "
                "shard_info names: register it with register_func()"
            )
