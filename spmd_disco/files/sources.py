"""The parameters of a file or a folder, of whatever format, of which parts can be read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .parts import Source
from .streams import Reader
from .untrusted import field, file_size, read_json

__all__ = ["ParamFiles", "Source", "open_params"]

Path = str | os.PathLike[str]

NUMPY_MAGIC, ZIP_MAGICS = b"\x93NUMPY", (b"PK\x03\x04", b"PK\x05\x06")
ALLOWED = (
    "a folder with tensor-cache.json, ndarray-cache.json, model.safetensors or "
    "model.safetensors.index.json, or one of these, a .safetensors, .npz or .npy file, or what "
    "TVM's save_param_dict or save_tensor wrote"
)


class ParamFiles(Mapping[str, Source]):
    """The parameters of a file or a folder, in the order of the file.

    It holds no open file, and can be pickled. As a context manager it does nothing but end.

    Attributes
    ----------
    path : str
    metadata : dict
        What the file says beside.
    """

    def __init__(self, path: str, sources: Iterable[Source], metadata: Any = None) -> None:
        self.path = path
        self.metadata = {} if metadata is None else metadata
        self._sources: dict[str, Source] = {}
        for source in sources:
            if source.name in self._sources:
                raise ValueError(f"{path} has parameter {source.name!r} twice")
            self._sources[source.name] = source

    def __getitem__(self, name: str) -> Source:
        return self._sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"<ParamFiles: {len(self)} parameters of {self.path}>"

    def __enter__(self) -> ParamFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: each read opens the file."""


def open_params(path: Path) -> ParamFiles:
    """Look at the parameters of a file or a folder, without reading them.

    Parameters
    ----------
    path : path-like
        A folder with ``tensor-cache.json``, ``ndarray-cache.json``, ``model.safetensors`` or
        ``model.safetensors.index.json``, or one of these files; a ``.safetensors``, ``.npz`` or
        ``.npy`` file; or what TVM's ``save_param_dict`` or ``save_tensor`` wrote.

    Raises
    ------
    ValueError
        It is none of these, or something in it is not as it should be.
    ImportError
        safetensors is needed and not installed.
    OSError
        There is no such file.
    """
    given = os.fsdecode(path)
    file = _in_folder(given) if os.path.isdir(given) else given
    if file.endswith(".json"):
        return _by_index(file)
    file_size(file)
    if file.endswith(".safetensors"):
        return _safetensors(file)
    with open(file, "rb") as stream:
        start = stream.read(8)
        stream.seek(0)
        if start.startswith(NUMPY_MAGIC):
            from .numpy_files import npy_sources

            return ParamFiles(file, npy_sources(file))
        if start.startswith(ZIP_MAGICS):
            from .numpy_files import npz_sources

            return ParamFiles(file, npz_sources(file))
        sources = _tvm_sources(Reader(stream, file), start)
    if sources is None:
        raise ValueError(f"{file} is no file of parameters: allowed are {ALLOWED}")
    return ParamFiles(file, sources)


def _in_folder(folder: str) -> str:
    from .tensor_cache import INDEX_NAMES

    for name in (*INDEX_NAMES, "model.safetensors.index.json", "model.safetensors"):
        file = os.path.join(folder, name)
        if os.path.exists(file):
            return file
    raise ValueError(f"the folder {folder} has no parameters: allowed are {ALLOWED}")


def _by_index(file: str) -> ParamFiles:
    """Return what an index file lists: that of a tensor cache, or of safetensors."""
    content = read_json(file)
    if isinstance(content, dict) and "weight_map" in content:
        return _safetensors_index(file, content)
    if isinstance(content, dict) and "records" in content:
        from .tensor_cache import TensorCacheIndex

        index = TensorCacheIndex.open(file)
        return ParamFiles(file, (record.source() for record in index.records), index.metadata)
    raise ValueError(
        f"{file} is no index of parameters: that of a tensor cache has 'records', that of "
        "safetensors has 'weight_map'"
    )


def _safetensors(file: str) -> ParamFiles:
    from .safetensors_files import safetensors_sources

    sources, metadata = safetensors_sources(file)
    return ParamFiles(file, sources, metadata)


def _safetensors_index(file: str, content: Mapping[str, Any]) -> ParamFiles:
    """Return the tensors that an index of several files lists, in the order of the files."""
    from .safetensors_files import safetensors_sources
    from .untrusted import data_file

    table = field(content, "weight_map", dict, file)
    places = {name: field(table, name, str, f"'weight_map' of {file}") for name in table}
    sources = []
    for place in dict.fromkeys(places.values()):
        found, _ = safetensors_sources(data_file(os.path.dirname(file), place, file))
        sources += [source for source in found if places.get(source.name) == place]
    missing = places.keys() - {source.name for source in sources}
    if missing:
        name = min(missing)
        raise ValueError(f"{file} says that {name!r} is in {places[name]!r}, and it is not")
    metadata = field(content, "metadata", dict, file) if "metadata" in content else {}
    return ParamFiles(file, sources, metadata)


def _tvm_sources(reader: Reader, start: bytes) -> list[Source] | None:
    """Return what is in a parameter dictionary or in a tensor record; None if it is neither."""
    from . import param_dict, records

    file, size = reader.where, reader.left
    magic = int.from_bytes(start, "little")
    if magic == param_dict.MAGIC:
        names = param_dict.read_names(reader)
    elif magic == records.MAGIC:
        names = [os.path.splitext(os.path.basename(file))[0]]
    else:
        return None
    sources = []
    for name in names:
        what = f"parameter {name!r}"
        header = records.read_header(reader, what)
        sources.append(
            Source(name, header.shape, header.dtype, file, reader.position, file_nbytes=size)
        )
        reader.skip(header.nbytes, what)
    reader.at_end()
    return sources
