"""`AsyncLoader`: a sized, restartable iterable of batches that are read ahead."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import operator
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.engine.device import streams
from lit_async_data.engine.device.feeds import Batch, CopyFeed, LentFeed, SlotFeed, moved
from lit_async_data.engine.device.queues import DeviceTransform, widened
from lit_async_data.engine.hooks import Function, HostHooks, check_callable, takes_rng
from lit_async_data.engine.loader.base_loader import BaseLoader, Engine, Taken, Wiring
from lit_async_data.engine.loader.recipe import Changes, Recipe, batch_seed, schedule_of, with_own_fields
from lit_async_data.engine.loader.resuming import AsyncWiring, Quarantine, Resuming
from lit_async_data.engine.pipeline.pipeline import Pipeline
from lit_async_data.engine.pipeline.sample_reader import Ahead, AroundBadSamples, ReadAround, ReaderSetup, SampleReader
from lit_async_data.engine.processes.pipeline import pipeline_of
from lit_async_data.engine.processes.shared_memory import check
from lit_async_data.engine.resources import ResourcePlan, Wanted, batches_ahead, slow
from lit_async_data.errors import ConfigError, MemoryBudgetError, ReadError, SourceError, TransformError
from lit_async_data.options import MAX_SEED, OF_LOADER, LoaderOptions, explains_names, lightning_seed
from lit_async_data.order.epoch_cursor import CursorState, EpochCursor, Place
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.plan import BatchIndex, EpochPlan, Schedule
from lit_async_data.sources.composed.composed import MixtureSource
from lit_async_data.sources.contract.checks import check_source
from lit_async_data.sources.contract.source import Source
from lit_async_data.system import leave_at_exit

log = logging.getLogger(__name__)

CHANGED = (
    "attributes of the source or of a transform were changed: batches that were read ahead are read again, now and "
    "whenever they change between two passes"
)
DRAWN = (
    "{}: reading or transforming drew random numbers from the global generator of {}: in a thread, results will change "
    "from run to run; set worker_kind=process, where they are seeded for each sample, or workers=0 "
    "(docs/data/transforms.md)"
)
SIDE_PASSES = 5  # separates keys of passes beside the engine from keys in sample_reader.py and engine/hooks.py


@explains_names(OF_LOADER)
class AsyncLoader(BaseLoader):
    """Batches of a source, read ahead while you compute.

    Iterate over it once per epoch. Each pass is a new epoch, in a new order if the options ask for a shuffle: the same
    order under a Trainer and elsewhere. The workers live on from pass to pass, and read the first batches of the next
    epoch before this one ends. On the CPU a batch is a view of the memory that it was read into. It is yours: whatever
    you keep of it never changes, and costs memory but never blocks.

    One thread may iterate at a time. Each ``iter`` is a pass of its own, and one at a time reads ahead: under a Trainer
    its own, elsewhere the first that was advanced, until it ends or is dropped. Another pass meanwhile is read in its
    loop, slowly, and changes nothing of the first. ``next(loader)``, `next` and `state_dict` are about the pass that
    reads ahead. Nothing is started or allocated before the first batch.

    `state_dict` is its place in the order, from which `load_state_dict` goes on, with any number of ranks and any batch
    size. After Ctrl-C, as in a notebook, the next batch is the first that you have not received; your batches stay as
    they are.

    Args:
        source: Where samples come from.
        options: `LoaderOptions`, or a mapping of their names.
        rank: This process, of ``world_size`` that share each step; None for 0.
        world_size: Number of such processes; None for 1. Where torch.distributed has several ranks, say which.
        device: Where batches are handed out. On a device with streams (CUDA) they are copied there on a stream of
            the loader's own; CPU and MPS get them in host memory.
        device_depth: Batches copied ahead of the one in use. 0 reads and copies nothing ahead, for comparison.
        sample_transform: Called with each sample on the host: a dict of numpy arrays, with the axes that a batch has,
            and with a ``numpy.random.Generator`` if it has a second parameter, or one named ``rng``. Returns a dict, or
            None if it has changed the given one, which belongs to it until it returns. The generator begins anew
            with each sample, by seed, epoch and sample (or place in the order, where samples repeat); it is None where
            `LoaderOptions.augment` says so. One thread at a time calls it. All results must have the keys, shapes and
            dtypes of the first sample's.
        batch_transform: Called with each batch on the host, after ``sample_transform`` and under the same rules; the
            first axis of each array stays the number of samples. Its generator goes by the first sample.
        device_transform: Called with each batch on its device, on the copying stream, and with a ``torch.Generator`` if
            it has a second parameter, or one named ``rng``; returns the batch to hand out. The generator begins anew
            with each batch, by seed, epoch and first sample; it is None where `LoaderOptions.augment` says so.

    Raises:
        ConfigError: Options are wrong, or do not fit the source; with the first batch, if several ranks of
            torch.distributed would read the same samples.
        MemoryBudgetError: The slots would take more than ``memory_budget``.

    Example:
        >>> import numpy as np
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.arange(10.0), "y": np.arange(10)})
        >>> with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False)) as loader:
        ...     [batch["y"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    _cursor: EpochCursor
    _wiring: AsyncWiring
    _is_beside = False  # whether it reads beside the engine of another loader

    def __init__(
        self,
        source: Source,
        options: LoaderOptions | Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        device_depth: int = 2,
        sample_transform: Function | None = None,
        batch_transform: Function | None = None,
        device_transform: Function | None = None,
    ) -> None:
        check_source("source", source)
        options = LoaderOptions.of(options)
        ranks = 0 if rank is None else operator.index(rank), 1 if world_size is None else operator.index(world_size)
        hooks = HostHooks.of(sample_transform, batch_transform)
        check_callable("device_transform", device_transform)
        self._given, self._evaluation = options, False
        self._take_recipe(Recipe(source, options, hooks, device_transform, ranks, is_ranked=world_size is not None))
        seed = self.options.seed
        if seed is None:
            seed = lightning_seed() if self.world_size == 1 else 0
        self._begin(self._scheduled(seed), "cpu" if device is None else device, device_depth)
        if hooks:  # they are called later: a constructor runs none of the user's code
            with_own_fields(source.spec, self.options)
        else:
            self._plan().budget.check()

    def _take_recipe(self, recipe: Recipe) -> None:
        self._recipe, self.source, self.options = recipe, recipe.source, recipe.options
        self.rank, self.world_size = recipe.ranks

    def _scheduled(self, seed: int) -> Schedule:
        # Hooks may draw from global generators.
        draws = bool(self._recipe.hooks) or takes_rng(self._recipe.device_transform)
        ranks, alike = self._recipe.ranks, self._evaluation
        return schedule_of(self.source, self.options, *ranks, seed=seed, transform_draws=draws, alike=alike)

    def _take_order(self, schedule: Schedule) -> None:
        self._wiring.schedule = self._cursor.schedule = schedule
        self._wiring.resuming.order_changed()
        self._plans: dict[tuple[bool, bool, int | None], ResourcePlan] = {}
        # Here Lightning looks for loaders that shuffle, to warn of them in evaluation.
        vars(self)["__pl_saved_kwargs"] = {"shuffle": schedule.plan(0).decks.shuffle != "none"}

    def _begin(self, schedule: Schedule, device: torch.device | str, device_depth: int) -> None:
        self._reset(device, device_depth)
        self._cursor = EpochCursor(schedule)
        self._wiring = AsyncWiring(
            schedule=schedule,
            resuming=Resuming(self.source, self._cursor),
            quarantine=Quarantine(self.source, self.options.max_bad, self.options.quarantine),
        )
        self._around: dict[BatchIndex, ReadAround] = {}  # of the pipeline
        self._take_order(schedule)
        # Lightning looks for `.batch_sampler.sampler.set_epoch`.
        self.batch_sampler = types.SimpleNamespace(sampler=self._wiring.resuming)
        # Why no reader process can be used; and whether the setup is known to be pickled.
        self._refusal, self._can_go = "", False
        self._changes = Changes(self._recipe)
        # The epoch of the last pass beside the engine, and the number of earlier ones in it.
        self._side_passes = -1, -1

    @property
    def evaluation(self) -> bool:
        """Whether the loader is for validation, test or prediction.

        It then draws no random numbers, lets no sample stand in for another, and all its passes are alike, in the order
        of its options. `AsyncDataModule` sets it for its stages. A change drops the batches that were read ahead.
        """
        return self._evaluation

    @evaluation.setter
    def evaluation(self, evaluation: bool) -> None:
        if evaluation:
            self._check_evaluation()
        options = self._given.evaluated() if evaluation else self._given
        same = evaluation == self._evaluation or (options == self.options and not self._wiring.schedule.shuffled)
        self._evaluation = evaluation
        if same:
            return
        self._stop()
        self._release()
        self._take_recipe(dataclasses.replace(self._recipe, options=options))
        self._restart()
        self._take_order(self._scheduled(self._wiring.schedule.seed))

    def _check_evaluation(self, *, predicts: bool = False) -> None:
        if self.source.chunks.drawn and (predicts or self._wiring.label.startswith("predict")):
            what = "patches_per_volume draws random parts; predict on a grid: the same source without it"
            raise ConfigError(f"{self.source.name}: {what}", "predict")
        if isinstance(self.source, MixtureSource) and (mixture := self.order.decks.mixture):
            counts = mixture.counts(len(self) * self.options.batch_size * self.world_size)
            if any(count > len(each) for count, each in zip(counts, self.source.sources, strict=True)):
                what = f"{self.source.described(counts)}: samples come again, which would count twice in evaluation"
                raise ConfigError(f"{what}; evaluate each source alone, as in val=[sim, real]", "source")

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, the same on every rank."""
        return self._wiring.schedule.steps

    def __repr__(self) -> str:
        options, closed = self.options, "closed " if self._run.closed else ""
        how = f"{len(self):,} batches of {options.batch_size:,}, shuffle={self.order.decks.shuffle}"
        return f"<{closed}AsyncLoader of {how}, from {self.source!r}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Even before it runs: `steps_wanted` belongs to this process.
        raise TypeError(
            "an AsyncLoader cannot be pickled or copied: its threads, memory and place in the order belong to "
            "this object and this process; pickle or copy its source and its options, and build another loader of them"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._run.engine is not None or self._cursor.state != CursorState():
            self.__reduce_ex__(4)
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _take(self) -> Taken:
        started = time.perf_counter()
        if self._cursor.state.fresh:
            self._begin_pass()
        cursor, run = self._cursor, self._run
        engine = run.engine
        if engine is None or run.interrupted or run.closed:
            engine = self._running()
        else:
            engine.feed.check()  # without another call: this is asked for each batch
        fill = engine.feed.ready + engine.queue.ready
        if cursor.state.fresh:
            run.before, run.began_s = self.stats(), started
            engine = self._with_changes(engine)
            self._follow(engine)
            self._wiring.resuming.announce()
        key = cursor.upcoming
        if key is None:
            run.asked_s, cursor.state = started, cursor.ended
            self._wiring.quarantine.tell()
            raise StopIteration
        after = cursor.after(key)
        run.interrupted = True  # until the request ends
        try:
            batch = self._batch(engine, key, started, fill)
            if key in self._around:
                self._wiring.quarantine.handed_out(key.step, cursor.schedule.plan(key.epoch), self._around.pop(key))
        except Exception as error:
            if isinstance(error, ReadError | SourceError | TransformError) or getattr(error, "in_its_place", False):
                cursor.state = after  # the batch counts as handed out; else it is asked for again
            leave_at_exit()
            if isinstance(error, IndexError):  # another thread may have emptied the queue
                engine.feed.check()
            raise
        return batch, after

    def next(self) -> Batch:
        """The next batch, waiting for it; after the last of an epoch comes the first of the next.

        Raises:
            ReadError, SourceError, TransformError, StalledError, WorkerError, ClosedError: See `__next__`.
        """
        if self._cursor.over:
            self._release()
            self._restart()
        return self.__next__()

    def _left(self) -> Place:
        return self._cursor.place()

    def _beside(self, left: Place | None) -> Iterator[Batch]:
        """Iterate over another loader, which reads in the caller's thread."""
        ways = "without reading ahead; a loader of its own reads ahead: AsyncLoader(loader.source, loader.options)"
        self._say(logging.WARNING, f"another iterator of this loader is read in the loop, {ways}")
        schedule = self._wiring.schedule
        if left is None:
            epoch, number = self._side_passes
            epoch, number = self._cursor.state.epoch, number + 1 if epoch == self._cursor.state.epoch else 0
            self._side_passes = epoch, number
            schedule = schedule.keyed(derived_key(schedule.seed, SIDE_PASSES, epoch + 1, number) & MAX_SEED)
        elif left.over:
            return iter(())
        beside = _Beside(self._recipe, schedule, self.device, self._wiring, evaluation=self._evaluation)
        beside._cursor.resume(left)  # noqa: SLF001
        return iter(beside)

    @property
    def _epoch_is_named(self) -> bool:
        return self._cursor.state.requested is not None

    def _prefetch(self, *, copy: bool = True) -> None:
        if not copy and not self._depth:
            return
        engine = self._running()
        with self._request():
            engine.queue.prefetch(self._wanted(engine), copy=copy)

    def _wanted(self, engine: Engine) -> BatchIndex:
        if self._cursor.state.fresh:
            self._follow(engine)
        return self._cursor.wanted

    # -- the place ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._wiring.quarantine.tell()
        super().close()

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be a pass over this epoch, counted from 0."""
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch, in plain values that are the same on every rank; a few hundred bytes.

        With it come the samples that this rank has found bad, if any: they are not read again.

        A batch that failed counts as handed out. Any thread may call it while no batch is being taken.
        """
        state, bad = self._wiring.resuming.state(), sorted(self._wiring.quarantine.known)
        return state | {"bad_samples": bad} if bad else state

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Have the next pass begin at a saved place, if it is a pass over that epoch. Reads no sample again.

        A loader whose options have no seed takes the seed of the place. The number of ranks and the batch size may
        differ from before. If `set_epoch` names no epoch, the next pass is over the epoch of the place, or over the
        next one if nothing remains.

        Args:
            state: The result of `state_dict`.
            force: Whether to go on at the same position though seed, shuffle, weights or data have changed.

        Raises:
            ResumeError: The state is damaged; in the middle of an epoch the order is another one now, and the message
                says what differs; or fewer samples remain than there are ranks.

        Example:
            >>> import numpy as np
            >>> from lit_async_data import AsyncLoader
            >>> from lit_async_data.testing import ArraySource
            >>> source = ArraySource({"y": np.arange(10)})
            >>> with AsyncLoader(source, {"batch_size": 4, "shuffle": False}) as loader:
            ...     next(loader)["y"].tolist(), loader.state_dict()["position"]
            ([0, 1, 2, 3], 4)
            >>> with AsyncLoader(source, {"batch_size": 3, "shuffle": False}) as other:
            ...     other.load_state_dict(loader.state_dict())
            ...     [batch["y"].tolist() for batch in other]
            [[4, 5, 6], [7, 8, 9]]
        """
        resuming, before = self._wiring.resuming, self._wiring.schedule.seed
        place = resuming.checked(state, force=force, any_seed=self._given.seed is None)
        if state["source"] == self.state_dict()["source"]:
            self._wiring.quarantine.remember(state.get("bad_samples", ()))
        self._stop()
        self._release()
        self._take_seed(operator.index(state["seed"]))
        if self._wiring.schedule.seed != before:
            resuming.report(f"the seed is {state['seed']}, as in the saved place, and no longer {before}")
        self._cursor.resume(place)

    def _check_ranks(self) -> None:
        distributed = torch.distributed
        ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if ranks > 1 and not self._recipe.is_ranked:
            ways = "rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size()), or world_size=1 "
            what = f"{ranks} ranks would all read the same samples; write AsyncLoader(…, {ways}if each is to read all"
            raise ConfigError(f"{what} of them", "world_size")

    def _take_seed(self, seed: int) -> None:
        """Use a seed, unless the options have one. Drops the batches that were read ahead."""
        if self._given.seed is None and seed != self._wiring.schedule.seed:
            self._stop()
            self._take_order(self._wiring.schedule.keyed(seed))

    def _begin_pass(self) -> None:
        """Take the seed of a run that begins, and warn of stored order in what looks like training."""
        if self._wiring.label:  # the loader belongs to a DataModule, or reads beside another one
            return
        begins = self._cursor.state.saved is None and not self._cursor.coming.epoch
        if begins and self.world_size == 1:
            self._take_seed(lightning_seed())
        unasked = self.options.shuffle is None and not self.options.drawn
        if unasked and not (self._evaluation or self.rank) and torch.is_grad_enabled():
            ways = "for training write shuffle=True in the loader's options, elsewhere shuffle=False or torch.no_grad()"
            self._say(logging.WARNING, f"{self.source.name}: samples come in stored order; {ways}")

    # -- the machinery --------------------------------------------------------------------------------------------

    @property
    def spec(self) -> BatchSpec:
        """The fields of a batch as it leaves ``batch_transform``. With host hooks, the first look calls them.

        Raises:
            TransformError: A host hook failed on the first samples.
            SourceError: They cannot be read.
            ConfigError: ``return_indices`` or ``pad_last`` needs a key that a field has.
        """
        return self._recipe.spec

    @property
    def footprint(self) -> ResourcePlan:
        """The threads and the memory that the loader takes from the first batch on.

        Raises:
            ConfigError: ``worker_kind=process`` is not possible here, or the source or a transform cannot be pickled.
        """
        plan = self._plan()
        if plan.workers.kind == "process" and not self._can_go:
            try:
                check(self._setup(plan), on_demand=self.options.worker_kind == "process")
                self._can_go = True
            except ConfigError as error:
                self._keep_here(error)
        return self._plan()

    def _plan(self) -> ResourcePlan:
        ahead, on_device = self._depth > 0, streams.has_streams(self.device)
        known = ahead, on_device, self.local_world_size
        if known not in self._plans:
            spec, schedule = self.spec.narrowed() if on_device else self.spec, self._wiring.schedule
            hooks, concat = self._recipe.transformation(schedule), self._recipe.concat
            given = self.source, spec, self.options, schedule, ahead, on_device, hooks
            self._plans[known] = ResourcePlan.of(Wanted(*given, self._refusal, self.local_world_size, concat))
        return self._plans[known]

    @property
    def order(self) -> EpochPlan:
        """The plan of the first epoch."""
        return self._wiring.schedule.plan(0)

    def _follow(self, engine: Engine) -> None:
        """Tell the feed the number of steps that the consumer will take of a pass that begins."""
        self._cursor.begin(self._wiring.steps_wanted)
        if (first := self._cursor.upcoming) is not None:
            self._wiring.quarantine.begin(first.epoch)
        assert isinstance(engine.feed, SlotFeed)
        engine.feed.follow(self._cursor.schedule)

    def _with_changes(self, engine: Engine) -> Engine:
        """The engine, which reads anew if the user has changed the source or a transform."""
        assert isinstance(engine.feed, SlotFeed)
        pipeline = engine.feed.pipeline
        try:
            with self._request():
                if not self._changes.found() or not (pipeline.worker_count or engine.copies):  # nothing is read ahead
                    return engine
                self._say(logging.INFO, CHANGED)
                if engine.side is None or not engine.side.capturing:  # a graph being recorded drops nothing
                    engine.rest()
                    pipeline.renew(self._setup(pipeline.setup.plan), self._wanted(engine))
                    return engine
        except Exception as error:
            self._stop()  # this engine would go on without the change, which is not found again
            if not isinstance(error, ConfigError | OSError):  # else the setup cannot be pickled any more, or sent
                raise
        self._stop()
        return self._running()

    def _new_engine(self) -> Engine:
        self._check_ranks()
        source, options = self.source, self.options
        self._changes.found()
        self._device = streams.exact_device(self.device)  # the current device may change
        on_device = streams.has_streams(self.device)
        pipeline, plan = self._pipeline(pin=self.device if on_device and not self._is_beside else None)
        self._around = pipeline.around
        # With the first batch, since not every loader that is described is used.
        warnings = [*slow(source, options, plan, self.order, ahead=self._depth > 0)]
        if plan.workers.kind == "thread" and (drawn := self._recipe.global_draws()):
            warnings.append(DRAWN.format(source.name, " and ".join(drawn)))
        for line in warnings:
            self._say(logging.WARNING, line)
        # Some fields have a narrower type in host memory than in a batch; the device casts.
        cast = widened(self.spec) if on_device else None
        if on_device and self._is_beside:
            cast = functools.partial(moved, self.device, cast)
        seed, function = self._recipe.seed(self._wiring.schedule), self._recipe.device_transform
        number = None if seed is None else functools.partial(batch_seed, source, self._cursor, seed)
        depth = options.queue_depth if plan.workers.threads else 0
        # Reader processes reserve their own memory.
        release = (lambda: None) if plan.workers.kind == "process" else plan.reserve(source)
        return Engine(
            (CopyFeed if on_device and not self._is_beside else LentFeed)(pipeline, depth, release),
            self.device,
            depth=self._depth,
            inline=self._is_beside,
            transform=DeviceTransform(function, self.device, number=number, cast=cast) if function or cast else None,
            asks=plan.workers.kind == "process",
        )

    def _setup(self, plan: ResourcePlan) -> ReaderSetup:
        source, options, recipe, schedule = self.source, self.options, self._recipe, self._wiring.schedule
        seed = recipe.seed(schedule) if source.chunks.random else None
        hooks, concat = recipe.transformation(schedule, plan.layout.batches), list(recipe.concat)
        global_seed = schedule.seed if plan.workers.seeds else None
        given = source, options.return_indices, seed, hooks, concat, plan.layout.buckets, options.pad_last
        read = SampleReader(*given, global_seed, self._evaluation)
        around = None
        if options.on_error != "raise":
            around = AroundBadSamples(read, options.on_error, self._wiring.quarantine.known)
        batches = batches_ahead(source, self.order, plan.layout.batches)
        ahead = Ahead(source, batches, plan.shares) if source.chunks.ahead else None
        return ReaderSetup(read, self._cursor.schedule, plan, ahead, around)

    def _pipeline(self, *, pin: torch.device | None) -> tuple[Pipeline, ResourcePlan]:
        plan, options = self.footprint, self.options
        plan.budget.check()
        if not self._wiring.label:  # else `AsyncDataModule.describe` has logged it
            self._say(logging.INFO, f"{self.source.name}: {plan.workers}")
            if isinstance(self.source, MixtureSource):
                self._say(logging.INFO, f"an epoch has {self.source.described(self.order.decks.counts)}")
        try:
            return pipeline_of(self._setup(plan), pin=pin, options=options), plan
        except ConfigError as error:  # too little memory; or a source that was changed and cannot be pickled now
            is_asked = isinstance(error, MemoryBudgetError) and options.worker_kind == "process"
            if plan.workers.kind != "process" or is_asked:
                raise
            self._keep_here(error)
        self._say(logging.INFO, f"{self.source.name}: {self.footprint.workers}")
        return self._pipeline(pin=pin)

    def _keep_here(self, error: ConfigError) -> None:
        """Read without a reader process, or raise an error if the user has asked for one."""
        name, why = self.source.name, self._recipe.hooks.unpicklable or str(error)
        if self.options.worker_kind == "process":
            what = f"{name} cannot go to a reader process: {why}"
            ways = "leave that out in __getstate__, or set worker_kind=thread"
            raise ConfigError(f"{what}; {ways}", "worker_kind") from error.__cause__
        self._refusal = why
        self._plans.clear()


class _Beside(AsyncLoader):
    """Reads a pass in the caller's thread, beside the engine of another loader."""

    _is_beside = True

    def __init__(
        self, recipe: Recipe, schedule: Schedule, device: torch.device, wiring: Wiring, *, evaluation: bool
    ) -> None:
        self._take_recipe(recipe)
        self._evaluation = evaluation
        self.options = dataclasses.replace(recipe.options, workers=0, worker_kind="auto", queue_depth=1, cache_bytes=0)
        self._begin(schedule, device, 0)
        self._wiring.label, self._wiring.logged = wiring.label or "another iterator", wiring.logged
