"""The house itself: imports go one way, modules stay small, importing costs nothing, names are what they should be."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import lit_async_data

PACKAGE = Path(lit_async_data.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
# The way of a batch; a module imports only modules above it.
ORDER = [
    "errors",
    "threads",
    "unexpected",
    "options",
    "order.permutation",
    "order.chunk_order",
    "order.weights",
    "order.weighted",
    "order.mixing",
    "order.plan",
    "batch.spec",
    "sources.hdf5.schema.field",
    "host.stats",
    "sources.base",
    "sources.cache_files",
    "sources.hdf5.storage.extra_codecs",
    "sources.hdf5.storage.codecs",
    "sources.hdf5.storage.failures",
    "sources.hdf5.storage.index_file",
    "sources.hdf5.storage.index_cache",
    "sources.hdf5.storage.records",
    "sources.hdf5.storage.index",
    "sources.hdf5.storage.identity",
    "sources.hdf5.schema.inspect",
    "sources.hdf5.readers.band_memory",
    "sources.hdf5.readers.chunk_cache",
    "sources.hdf5.storage.residency",
    "sources.hdf5.storage.open_file",
    "sources.hdf5.storage.open_files",
    "sources.hdf5.storage.readahead",
    "sources.hdf5.readers.ranges",
    "sources.hdf5.readers.base",
    "sources.hdf5.readers.raw",
    "sources.hdf5.readers.bands",
    "sources.hdf5.readers.chunked",
    "sources.hdf5.schema.encoded",
    "sources.hdf5.readers.ranged",
    "sources.hdf5.schema.conversion",
    "sources.hdf5.schema.window_starts",
    "sources.hdf5.schema.open_group",
    "sources.hdf5.schema.stored_field",
    "sources.hdf5.schema.selection",
    "sources.hdf5.schema.part",
    "sources.hdf5.schema.samples",
    "sources.hdf5.readers.part_reader",
    "sources.hdf5.schema.chunk_grouping",
    "sources.hdf5.readers.decode_memory",
    "sources.hdf5.readers.part_readers",
    "sources.hdf5.source",
    "sources.torch_values",
    "sources.torch_dataset",
    "sources.places",
    "sources.subset",
    "sources.concat",
    "sources.groups",
    "sources.split",
    "sources.manifest.table.arrow",
    "sources.manifest.table.row_origin",
    "sources.manifest.table.numeric",
    "sources.manifest.table.filters",
    "sources.manifest.table.header",
    "sources.manifest.table.delimited",
    "sources.manifest.table.json_lines",
    "sources.manifest.table.parquet",
    "sources.manifest.table.reading",
    "sources.manifest.table.duplicate_ids",
    "sources.manifest.table.labels",
    "sources.manifest.table.table",
    "sources.manifest.table.table_cache",
    "sources.manifest.table.table_reader",
    "sources.manifest.images.image_shape",
    "sources.manifest.column",
    "sources.manifest.rows",
    "sources.manifest.files.stored_file",
    "sources.manifest.files.prefetcher",
    "sources.manifest.paths",
    "sources.manifest.infer_kind",
    "sources.manifest.files.npy",
    "sources.manifest.images.cropping",
    "sources.manifest.images.orientation",
    "sources.manifest.images.image_bytes",
    "sources.manifest.images.jpeg",
    "sources.manifest.images.tiff",
    "sources.manifest.images.png",
    "sources.manifest.images.stored_values",
    "sources.manifest.images.strips",
    "sources.manifest.images.resizing",
    "sources.manifest.images.picture",
    "sources.manifest.images.pixels",
    "sources.manifest.images.image",
    "sources.manifest.files.decoders",
    "sources.manifest.label_field",
    "sources.manifest.file_field",
    "sources.manifest.hdf5_fields",
    "sources.manifest.fields",
    "sources.manifest.validation",
    "sources.manifest.class_folders",
    "sources.manifest.selection",
    "sources.manifest.source",
    "host.memory",
    "host.slots",
    "host.job",
    "host.resource_plan",
    "host.schedule",
    "host.pipeline",
    "device.checksum",
    "device.streams",
    "device.clock",
    "device.canary",
    "device.randomness",
    "device.transform",
    "device.inline_queue",
    "device.feed",
    "device.slot_feed",
    "batch.transforms",
    "device.stream_queue",
    "host.decode_ahead",
    "host.nan_check",
    "engine",
    "order.epoch_cursor",
    "loader",
    "batch.tree",
    "batch.tensor_layout",
    "prefetch.pinned_buffers",
    "prefetch.packing",
    "prefetch.reader_thread",
    "prefetch.draw_watch",
    "prefetch.accelerate_marks",
    "prefetch.state_snapshot",
    "prefetch.iterator_feed",
    "prefetch.host_queue",
    "prefetch.engine",
    "prefetch.sharding",
    "prefetch.loader_iterator",
    "prefetch.loader",
    "prefetch.stateful",
    "prefetch.wrap",
    "lightning.summary",
    "lightning.compat",
    "lightning.resume",
    "lightning.stages",
    "lightning.classes",
    "lightning.datamodule",
    "lightning.waiting",
    "lightning.progress",
    "lightning.batch_hooks",
    "lightning.takeover",
    "lightning.prefetcher",
    # Never imported by the way of a batch:
    "reference.commandline",
    "testing",
    "reference.demo",
]


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", [alias.name for alias in node.names]
            yield from [f"{module}.{name}" for name in names] if module == "lit_async_data" else [module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_module_has_its_place():
    assert sorted(map(dotted, MODULES)) == sorted(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_imports_only_modules_above_it(path):
    mine = ORDER.index(dotted(path))
    for name in imported(path):
        if name.startswith("lit_async_data."):
            assert ORDER.index(name.removeprefix("lit_async_data.")) < mine, name


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_has_at_most_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "name",
    [
        "host.slots",
        "order.plan",
        "order.permutation",
        "order.chunk_order",
        "order.weights",
        "order.weighted",
        "order.mixing",
        "options",
        "errors",
        "batch.spec",
        "host.stats",
        "order.epoch_cursor",
        "batch.tree",
        "prefetch.pinned_buffers",
        "prefetch.accelerate_marks",
        "host.nan_check",
        "prefetch.state_snapshot",
        "lightning.waiting",
    ],
)
def test_pure_modules_import_no_torch(name):
    found = set(imported(PACKAGE / f"{name.replace(chr(46), chr(47))}.py"))
    assert not any(module.split(".")[0] in {"torch", "h5py", "pytorch_lightning"} for module in found)


def test_importing_the_package_loads_nothing_heavy():
    program = (
        "import sys, lit_async_data; "
        "heavy = {'torch', 'pytorch_lightning', 'lightning', 'h5py', 'numpy', 'pyarrow', 'PIL'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_can_be_imported_and_has_an_example():
    for name in lit_async_data.__all__:
        assert ">>> " in getattr(lit_async_data, name).__doc__, name


def test_every_public_name_and_its_methods_say_what_they_are():
    for name in lit_async_data.__all__:
        public = getattr(lit_async_data, name)
        for method in [name for name in vars(public) if name[0] != "_"] if isinstance(public, type) else []:
            found = inspect.getattr_static(public, method)
            if isinstance(found, (types.FunctionType, property, classmethod, staticmethod)):
                assert inspect.getdoc(getattr(public, method)), f"{name}.{method}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Loader"):
        lit_async_data.Loader


def test_the_readme_of_the_package_names_every_module():
    text = (PACKAGE / "README.md").read_text()
    for module in ORDER:
        name = module.split(".")
        assert f"`{name[-1]}.py`" in text or f"`{'/'.join(name)}.py`" in text or f"`{name[0]}/`" in text, module
