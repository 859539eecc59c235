"""What `initialize` is told of the job's ranks: a mesh of torch's, as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zero.communication.grid import DATA, Grid
from zero.communication.job import Arranged
from zero.config.training import Config
from zero.drafts.checks import check_process_group
from zero.errors import ConfigError, some

Dims = str | Sequence[str] | None


def arrangement(
    process_group: ProcessGroup | None,
    mesh: DeviceMesh | None,
    data_dims: Dims,
    shard_dims: Dims,
    config: Config,
) -> Arranged | None:
    """How the program arranges the job's ranks; None where it gives no mesh. Makes no groups.

    Raises ConfigError for anything that does not fit together, or not with the settings.
    """
    check_process_group(process_group)
    if mesh is None:
        _check_no_dims(data_dims, shard_dims, config)
        return None
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; "
            "init_device_mesh makes one"
        )
    if process_group is not None:
        raise ConfigError(
            "process_group and mesh are both given: leave process_group out, as the mesh says which ranks "
            "train together"
        )
    if config.shard_ranks is not None:
        raise ConfigError(
            f"shard_ranks={config.shard_ranks} and mesh are both given: leave shard_ranks out, and name the "
            "dimensions that parameters are sharded over: zero.initialize(..., shard_dims=...)"
        )
    names = _names_of(mesh)
    if mesh.get_coordinate() is None:
        raise ConfigError("this rank is not in the mesh: only the mesh's ranks call zero.initialize with it")
    return _arranged(mesh, names, data_dims, shard_dims, config)


def _arranged(
    mesh: DeviceMesh, names: tuple[str, ...], data_dims: Dims, shard_dims: Dims, config: Config
) -> Arranged:
    if data_dims is None and len(names) > 1:
        raise ConfigError(
            f"the mesh has dimensions {some(names)}: say along which ranks have different data, as in "
            f"data_dims=({names[0]!r},)"
        )
    data = frozenset(names) if data_dims is None else _known("data_dims", data_dims, names)
    shards = data if shard_dims is None else _known("shard_dims", shard_dims, names)
    if not shards <= data:
        raise ConfigError(
            f"shard_dims: along {some(sorted(shards - data))} ranks have the same data, and parameters "
            f"are not sharded there: name dimensions of data_dims, {some(sorted(data))}"
        )
    if shards != data and config.stage == 0:
        raise ConfigError("shard_dims: at stage 0 every rank has the whole model; set stage=1, 2 or 3")
    for pattern, dim in config.local_modules:
        if dim not in names:
            raise ConfigError(f"local_modules={{{pattern!r}: {dim!r}}}: {_unknown(dim, names)}")
    stages = frozenset(dim for pattern, dim in config.local_modules if pattern == "*") - data
    started = [int(rank) for rank in mesh.mesh.flatten()]
    ranks = tuple(sorted(started))
    numbers = {rank: number for number, rank in enumerate(ranks)}
    sizes = tuple(mesh.mesh.shape)
    return Arranged(ranks, Grid(names, sizes, tuple(numbers[rank] for rank in started), data, shards, stages))


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if names is not None:
        return tuple(names)
    if mesh.ndim == 1:
        return (DATA,)
    raise ConfigError(
        f"the mesh's {mesh.ndim} dimensions have no names: give them with init_device_mesh(..., "
        "mesh_dim_names=...)"
    )


def _known(what: str, given: str | Sequence[str], names: Sequence[str]) -> frozenset[str]:
    dims = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not dims:
        raise ConfigError(f"{what} is empty: name at least one of the mesh's dimensions, {some(names)}")
    for dim in dims:
        if dim not in names:
            raise ConfigError(f"{what}: {_unknown(dim, names)}")
    return frozenset(dims)


def _unknown(dim: object, names: Sequence[str]) -> str:
    return f"the mesh has no dimension {dim!r}; it has {some(names)}"


def _check_no_dims(data_dims: Dims, shard_dims: Dims, config: Config) -> None:
    for name, given in (("data_dims", data_dims), ("shard_dims", shard_dims)):
        if given is not None:
            raise ConfigError(f"{name} names dimensions of a mesh: pass it, zero.initialize(..., mesh=mesh)")
    if config.local_modules:
        raise ConfigError(
            "local_modules names a dimension of a mesh: pass it, zero.initialize(..., mesh=mesh, "
            "data_dims=...)"
        )
