"""`Store`: where objects lie, in a bucket, behind a web server, or below a filesystem of fsspec; checks each answer."""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
import fnmatch
import functools
import itertools
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lit_async_data import system
from lit_async_data.errors import AsyncDataError, ChangedError, ConfigError, FormatError, MissingError, StoreError
from lit_async_data.options import check_names, within
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.transport import forked
from lit_async_data.sources.local_files import files_matching, is_address, natural, opening, retry_once
from lit_async_data.system import Lazy, ProcessGuard, usable_cores

obstore, fsspec = Lazy("obstore"), Lazy("fsspec")
exceptions, stores = Lazy("obstore.exceptions"), Lazy("obstore.store")


class Version(NamedTuple):
    """Which state of an object its answers must be of."""

    size: int
    tag: str  # its ETag; of a server that sends none, the time of its last change
    strong: bool  # whether the server compares the tag with that of each request
    identity: FileIdentity | None = None  # of a file on a mount


# Schemes that obstore reads; fsspec reads the others.
_BUCKETS, _WEB = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"), ("http", "https")


@functools.lru_cache(1024)  # asked for each request
def parts_of(path: str) -> tuple[str, str]:
    """The store of an address, and the name of the object in it; a path of a mount is the name itself."""
    if not is_address(path):
        return "", path
    if re.match(r"\w+::|.*::\w+://", path):
        what = f"{path}: a chain of filesystems; give the last address, and cache=FOLDER to keep what was fetched"
        raise ConfigError(what, "path")
    scheme, _, rest = path.partition("://")
    if re.match("[^/]*:[^/]*@", rest):
        what = f"{scheme}://…@{rest.partition('@')[2]}: holds a password, which messages would show"
        raise ConfigError(f"{what}; give it as storage_options, or by the environment", "path")
    host, _, name = rest.partition("/")
    if scheme.lower() not in (*_BUCKETS, *_WEB):
        return f"{scheme}://{host}", path
    if not host or not name:
        raise ConfigError(f"{path!r} names no object; write {scheme}://BUCKET/NAME", "path")
    if scheme.lower() in _WEB and ("@" in host or not _is_valid(f"{scheme}://{host}")):
        shown = f"…@{host.rpartition('@')[2]}" if "@" in host else "…"
        what = f"{scheme}://{shown}: is no host, or holds a secret, which messages would show"
        raise ConfigError(f"{what}; give secrets as storage_options, in client_options", "path")
    if scheme.lower() in _WEB and "?" in name:
        what = f"{path.partition('?')[0]}?…: what follows the question mark may be secret, and addresses are not"
        raise ConfigError(f"{what}; give it as storage_options={{'query': …}}, the same for all files", "path")
    return f"{scheme}://{host}", urllib.parse.unquote(name) if scheme.lower() in _WEB else name


def _is_valid(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        return bool(parts.hostname) and (parts.port or 1) > 0 and not re.search(r"\s", address)
    except ValueError:  # a port that is no number, as behind a password with a slash
        return False


def store_of(root: str, options: Mapping[str, Any], given: Any, note: str = "") -> Store:
    """The store of an address; ``given`` is one of obstore's stores, or a filesystem of fsspec, in its place."""
    if given is not None:
        if hasattr(given, "cat_file"):
            return FilesystemStore(root, {}, given, note)
        if type(given).__module__.partition(".")[0] == "obstore":
            return ObjectStore(root, {}, given, note)
        raise ConfigError(f"{type(given).__name__} is neither a store of obstore nor a filesystem of fsspec", "storage")
    if not root:
        return MountStore(root, {})
    kind = ObjectStore if root.partition("://")[0].lower() in (*_BUCKETS, *_WEB) else FilesystemStore
    return kind(root, options, note=note)


# The process that called a store first: the threads of its clients are missing in a fork, where calls hang.
_CALLER: list[ProcessGuard] = []

# Whether pickles hold secrets: those that go to reader processes do.
SECRETS = contextvars.ContextVar("SECRETS", default=False)
_PUBLIC = {"anon", "endpoint", "endpoint_url", "region", "region_name", "request_payer", "requester_pays", "revision"}
_PUBLIC |= {"account_name", "base_url", "retry_config", "skip_signature", "virtual_hosted_style_request"}


def public(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are known to hold no secret."""
    return {name: value for name, value in options.items() if name in _PUBLIC and "@" not in str(value)}


class Store:
    """Where objects lie. Thread-safe. Its calls block, for as long as it tries again, and must not be made in a fork.

    Another library reads a bucket, a server or a scheme: by what the user has ``given``, or what is made here. Errors
    end with the ``note``.
    """

    #: The version of an object, and its first bytes, up to a number.
    head: Callable[[str, int], tuple[Version, memoryview]]
    #: Bytes of an object from one up to another, if it still has this version.
    get: Callable[[str, int, int, Version], memoryview]
    _made: Callable[[], Any]
    _listed: Callable[[str], Iterable[list[str]]]
    _meaning: Callable[[Exception], tuple[type[StoreError | MissingError | ChangedError], str]]

    def __init__(self, url: str, options: Mapping[str, Any], given: Any = None, note: str = "") -> None:
        self.url, self._options, self._given, self._note = url, dict(options), given, note
        self.arrived: Callable[[int], None] = lambda _: None  # counts bytes as they come
        self._unchanged = set[tuple[str, Version]]()  # versions that a `FilesystemStore` has seen itself

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"  # options may be secrets

    @functools.cached_property
    def _client(self) -> Any:
        if not _CALLER:
            _CALLER.append(ProcessGuard())
        if _CALLER[0].forked:
            raise forked(_CALLER[0])
        client = self._made() if self._given is None else self._given
        if hasattr(client, "invalidate_cache"):
            client.invalidate_cache()  # a filesystem of fsspec knows what it listed before objects changed
        return client

    def matching(self, pattern: str, call: Callable[[Callable[[], Any]], Any]) -> list[str]:
        """The objects that match a pattern, in natural order; ``call`` calls what calls the store, page by page."""
        pages = iter(self._listed(pattern))

        def page() -> list[str] | None:
            with self._errors(pattern):
                return next(pages, None)

        found = list[str](itertools.chain.from_iterable(iter(lambda: call(page), None)))
        if not found:
            hint = "; a bracket that is part of a name is written [[]" * ("[" in pattern)
            raise MissingError(f"{pattern}: matches no object; check the pattern{hint}", file=pattern)
        return [pattern] if pattern in found else sorted(found, key=natural)  # an object may have that very name

    @contextlib.contextmanager
    def _errors(self, name: str, place: str = "") -> Iterator[None]:
        try:
            yield
        except AsyncDataError:
            raise
        except BaseException as error:  # noqa: BLE001  # whatever a library raises; a panic of obstore is no Exception
            kind, what = self._meaning(error) if isinstance(error, Exception) else (StoreError, _PANIC)
            if kind is StoreError:
                what = f"{_without(self._options, what)}{self._note}"
            cause = error if str(error) == _without(self._options, str(error)) else None  # a traceback prints it
            raise kind(f"{name}{'' if kind is MissingError else place}: {what}", file=name) from cause


class MountStore(Store):
    """Files of a slow mount, such as NFS."""

    def head(self, name: str, nbytes: int) -> tuple[Version, memoryview]:
        with self._errors(name), opening(name, system.NO_BLOCKING) as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            return Version(identity.size, str(identity.state), True, identity), memoryview(file.read(nbytes) or b"")

    def get(self, name: str, begin: int, end: int, version: Version) -> memoryview:
        was = version.identity
        assert was is not None
        with self._errors(name), opening(name, system.NO_BLOCKING) as file:
            data = retry_once(functools.partial(system.pread, file.fileno(), end - begin, begin))
            change = was.difference(FileIdentity.of(os.fstat(file.fileno())), name)
        self.arrived(len(data))
        if change is not None or len(data) != end - begin:
            what = f"{change or 'shrank'} since the source was built; build the source again"
            raise ChangedError(f"{name}, bytes {begin} to {end}: {what}", file=name)
        return memoryview(data)

    def _listed(self, pattern: str) -> Iterator[list[str]]:
        yield files_matching(pattern)

    def _meaning(self, error: Exception) -> tuple[type[StoreError | MissingError | ChangedError], str]:
        if isinstance(error, FileNotFoundError):
            return MissingError, "no such file; check the path"
        return StoreError, f"cannot be read: {getattr(error, 'strerror', None) or error}; check the mount"


class FilesystemStore(Store):
    """Any filesystem of fsspec. Nothing tells whether an object changes between two of its answers."""

    def _made(self) -> Any:
        scheme = self.url.partition("://")[0]
        try:
            return fsspec.url_to_fs(self.url, **self._options)[0]
        except (ImportError, ValueError, TypeError) as error:
            advice = f"obstore reads {', '.join(_BUCKETS + _WEB)}"
            if isinstance(error, TypeError):  # an argument that neither the address nor an option gives
                advice = f"write {scheme}://HOST/NAME, or give it as storage_options"
            raise ConfigError(f"{scheme}:// cannot be read: {_first_line(error)}; {advice}", "path") from error

    def head(self, name: str, nbytes: int) -> tuple[Version, memoryview]:
        version = self._version(name)
        return version, self._read(name, 0, min(nbytes, version.size))

    def _version(self, name: str) -> Version:
        with self._errors(name):
            found = self._client.info(name)
            if found.get("size") is None:
                what = f"{name}: its server says no size, so parts of it cannot be read; fetch the file"
                raise FormatError(what, file=name)
            tag = str(found.get("ETag") or found.get("etag") or self._client.ukey(name))
            version = Version(int(found["size"]), tag, strong=False)
        self._unchanged.add((name, version))
        return version

    def get(self, name: str, begin: int, end: int, version: Version) -> memoryview:
        if (name, version) not in self._unchanged and self._version(name) != version:
            raise ChangedError(f"{name}, bytes {begin} to {end}: {_CHANGED}", file=name)
        return self._read(name, begin, end)

    def _read(self, name: str, begin: int, end: int) -> memoryview:
        with self._errors(name, f", bytes {begin} to {end}"):
            read = self._client.cat_file
            # fsspec's own opens the object each time, and reads 5 MiB ahead.
            own = getattr(read, "__func__", None) is fsspec.AbstractFileSystem.cat_file
            data = memoryview(read(name, start=begin, end=end, **({"cache_type": "none"} if own else {})))
        self.arrived(len(data))
        _check(name, begin, end, data)
        return data

    def _listed(self, pattern: str) -> Iterator[list[str]]:
        found = self._client.glob(pattern)
        yield list(map(self._client.unstrip_protocol, found)) if is_address(pattern) else found

    def _meaning(self, error: Exception) -> tuple[type[StoreError | MissingError | ChangedError], str]:
        if isinstance(error, FileNotFoundError):
            return MissingError, "no such object; check the address, and the credentials if it is not public"
        return StoreError, f"cannot be read: {type(error).__name__}: {_first_line(error)}; {CHECK}"


# Names of pandas, xarray and s3fs for options, and obstore's; an option that is true or false may be turned around.
_NAMES = {
    "anon": "skip_signature",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "requester_pays": "request_payer",
}
# obstore refuses unknown names itself, but for these.
_RETRY_NAMES = ["max_retries", "retry_timeout", "backoff", "init_backoff", "max_backoff", "base"]
_CHANGED = "changed since the source was built; build it again"
CHECK = "check the network, the address and the credentials"
_PANIC = "obstore failed at this request; check the address, and the endpoint and other storage_options"
_PAGE = 1000  # objects of a list that come at a time
# After this time a request is not tried again. A try may take long while bytes come, but none may come for a minute.
_RETRY, _REQUEST, _READ, _CONNECT = (dt.timedelta(seconds=number) for number in (120, 3600, 60, 5))
_PIECE = 2**18  # bytes of an answer that count as a sign of life


def _start_runtime() -> None:
    """Have obstore read sockets in one thread for four cores: one per core wake each other for each piece."""
    workers = "TOKIO_WORKER_THREADS"
    if workers not in os.environ:
        os.environ[workers] = str(max(usable_cores() // 4, 1))
        obstore.put(stores.MemoryStore(), "", b"")  # the first call reads the variable
        os.environ.pop(workers, None)


class ObjectStore(Store):
    """A bucket, or a web server, by obstore."""

    def _made(self) -> Any:
        options = dict(self._options)
        try:
            return self._from_options(options | options.pop("client_kwargs", {}))
        except ConfigError:
            raise
        except ImportError as error:
            what = f"{self.url} is read by obstore; install it: pip install 'lit_async_data[cloud]'"
            raise ConfigError(what, "path") from error
        except (exceptions.BaseError, ValueError, TypeError) as error:
            text = _first_line(error).rstrip(".")
            for name in map(str, options):  # as the user has typed it
                text = text.replace(repr(_NAMES.get(name, name)), repr(name))
            raise ConfigError(f"{self.url} cannot be used: {text}; see obstore's options", "storage_options") from error

    def _from_options(self, options: Mapping[str, Any]) -> Any:
        names = _NAMES | ({"endpoint_url": "base_url"} if self.url.startswith("gs://") else {})
        config: dict[str, Any] = {names.get(str(name), str(name)): value for name, value in options.items()}
        times = {"timeout": _REQUEST, "read_timeout": _READ, "connect_timeout": _CONNECT}
        client = {**times, **config.pop("client_options", {})}
        endpoint = str(config.get("endpoint") or config.get("base_url") or os.environ.get("AWS_ENDPOINT_URL", ""))
        if endpoint and not _is_valid(endpoint):
            what = "the endpoint is no address; write https://HOST or http://HOST, without a password"
            raise ConfigError(what, "storage_options")
        plain = self.url.startswith("http://") or endpoint.startswith("http://")
        client.setdefault("allow_http", config.pop("allow_http", plain))
        retry = {"retry_timeout": _RETRY, "max_retries": 1000, **config.pop("retry_config", {})}
        for where, given in (("retry_config.", retry), ("retry_config.backoff.", retry.get("backoff", {}))):
            with within(f"storage_options.{where}"):
                check_names(given, _RETRY_NAMES)
        query = config.pop("query", "")
        _start_runtime()
        made = stores.HTTPStore.from_url if self.url.startswith(_WEB) else stores.from_url
        return made(self.url + f"/?{query}" * bool(query), client_options=client, retry_config=retry, **config)

    def head(self, name: str, nbytes: int) -> tuple[Version, memoryview]:
        began = time.monotonic()
        try:
            return self._got(name, 0, nbytes)
        except StoreError:
            if time.monotonic() - began < _CONNECT.total_seconds():  # an answer, and not the last of many tries
                with contextlib.suppress(exceptions.BaseError, OSError):
                    if not obstore.head(self._client, parts_of(name)[1])["size"]:  # of which no range is answered
                        raise FormatError(f"{name}: is empty; check the address", file=name) from None
            raise

    def get(self, name: str, begin: int, end: int, version: Version) -> memoryview:
        now, data = self._got(name, begin, end, **({"if_match": version.tag} if version.strong else {}))
        if now != version:
            raise ChangedError(f"{name}, bytes {begin} to {end}: {_CHANGED}", file=name)
        return data

    def _got(self, name: str, begin: int, end: int, **condition: str) -> tuple[Version, memoryview]:
        with self._errors(name, f", bytes {begin} to {end}" * ((begin, end) != (0, 2**32))):  # a whole file
            client = self._client  # first, since it tells whether obstore is there
            found = obstore.get(client, parts_of(name)[1], options={"range": (begin, end), **condition})
            meta, pieces = found.meta, list[Any]()  # made anew at each look
            size, tag = meta["size"], meta["e_tag"] or ""
            for piece in found.stream(min_chunk_size=_PIECE):
                self.arrived(len(piece))
                pieces.append(piece)
            data = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        _check(name, begin, min(end, size), data)  # obstore has compared the place
        changed, strong = meta["last_modified"], bool(tag) and not tag.startswith("W/")
        if not tag and not changed.timestamp():
            what = "its server sends neither ETag nor Last-Modified, so no change of it would be noticed"
            raise StoreError(f"{name}: {what}; fetch the file", file=name)
        return Version(size, tag or changed.isoformat(), strong), data

    def _listed(self, pattern: str) -> Iterator[list[str]]:
        if self.url.startswith(_WEB):
            what = "a web server lists no files; give the addresses as a list, without queries (?…), and with %5B for ["
            raise ConfigError(f"{pattern}: {what}", "path")
        key = parts_of(pattern)[1]
        fits, prefix = re.compile(pattern_as_regex(key)).fullmatch, pattern.removesuffix(key)
        folder = re.split(r"[*?\[]", key, maxsplit=1)[0].rpartition("/")[0]  # obstore takes whole names of folders
        for page in self._client.list(folder or None, chunk_size=_PAGE):
            yield [prefix + name for each in page if fits(name := each["path"]) or name == key]

    def _meaning(self, error: Exception) -> tuple[type[StoreError | MissingError | ChangedError], str]:
        text = _first_line(error)
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            region = " and the region" * self.url.startswith("s3")
            return MissingError, f"no such object; check the address{region}"
        if isinstance(error, exceptions.PreconditionError):
            return ChangedError, _CHANGED
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            what = "the store refuses these credentials; check them, and the address, or give storage_options="
            of_web = "{'client_options': {'default_headers': {'Authorization': …}}}, or {'query': …}"
            given = of_web if self.url.startswith(_WEB) else "{'anon': True} if it is public"
            return StoreError, f"{what}{given} ({text})"
        if isinstance(error, exceptions.NotSupportedError):
            return StoreError, f"{text}; fetch the file, or serve it by a server that sends ranges"
        bucket = "" if self.url.startswith(_WEB) else f", whether there is a bucket {self.url.partition('://')[2]}"
        region = ", and the region: storage_options={'region': …}" if self.url.startswith("s3") else ""
        return StoreError, f"cannot be read: {text}{_innermost(error)}; {CHECK}{bucket}{region}"


def _innermost(error: BaseException) -> str:
    """Why a request got no answer, such as a certificate that is not trusted: the end of what obstore prints."""
    cause = str(error).partition("HttpError {")[2]  # an answer, which may quote keys, stands elsewhere
    lines = [line for each in cause.splitlines() if (line := each.strip(" ,(){}"))]
    return f" ({', '.join(lines[-3:])})" if lines else ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()


def _without(options: Mapping[str, Any], text: str) -> str:
    """A message without the values of options, which may be secrets."""
    for value in options.values():
        if isinstance(value, str) and len(value) > 3 and value not in public(options).values():
            text = text.replace(value, "…")
    return re.sub(r"\?[^\s()\"']*", "?…", text) if "query" in options else text  # which a client may have encoded


def _check(name: str, begin: int, end: int, data: memoryview) -> None:
    if len(data) != end - begin:
        what = f"bytes {begin} to {end} were asked for, and {len(data)} came"
        raise StoreError(f"{name}: {what}; check the server, or the proxy before it", file=name)


_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}
_FOLDERS = "(?:[^/.][^/]*/)*"


def pattern_as_regex(pattern: str) -> str:
    """As `glob`: ``**`` stands for any number of folders, and hidden names match only where the dot is written."""
    *folders, name = pattern.split("/")
    found = [_FOLDERS if each == "**" else f"{_as_regex(each)}/" for each in folders]
    return "".join([*found, _FOLDERS * (name == "**"), _as_regex(name)])


def _as_regex(name: str) -> str:
    found = "" if name.startswith(".") else r"(?!\.)"
    for each in re.split(r"(\[!?\]?[^\]]*\]|[*?])", name):
        # As fnmatch, which begins with (?s: and ends with )\Z; but nothing stands for a slash.
        found += _WILDCARDS.get(each) or "(?!/)" * each.startswith("[") + fnmatch.translate(each)[4:-3]
    return found
