# SPDX-License-Identifier: LGPL-2.1-or-later

"""Objects of slab caches, and the types of caches that have objects of one type."""

from collections.abc import Mapping
from functools import cached_property

import drgn
from drgn import cast
from drgn.helpers.linux.mm import page_to_virt
from drgn.helpers.linux.slab import find_containing_slab_cache, slab_object_info

from msatools.errors import (
    LOST,
    UNREADABLE,
    MissingError,
    MissingMemberError,
    NotSupportedError,
)
from msatools.kernel.losses import Loss
from msatools.kernel.slab import SlabCache, merged_names, read_cache
from msatools.selfdesc.find import ask, drgn_lookups, find_type
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import SlabPlace

TYPES = {
    "TCP": "tcp_sock",
    "TCPv6": "tcp6_sock",
    "UDP": "udp_sock",
    "UDPv6": "udp6_sock",
    "UNIX": "unix_sock",
    "UNIX-STREAM": "unix_sock",
    "bdev_cache": "bdev_inode",
    "blkdev_ioc": "io_context",
    "cred_jar": "cred",
    "eventpoll_epi": "epitem",
    "eventpoll_pwq": "eppoll_entry",
    "ext4_inode_cache": "ext4_inode_info",
    "file_lock_cache": "file_lock",
    "files_cache": "files_struct",
    "filp": "file",
    "fs_cache": "fs_struct",
    "inode_cache": "inode",
    "kernfs_node_cache": "kernfs_node",
    "mnt_cache": "mount",
    "mqueue_inode_cache": "mqueue_inode_info",
    "posix_timers_cache": "k_itimer",
    "proc_inode_cache": "proc_inode",
    "radix_tree_node": "xa_node",
    "shmem_inode_cache": "shmem_inode_info",
    "sighand_cache": "sighand_struct",
    "signal_cache": "signal_struct",
    "skbuff_head_cache": "sk_buff",
    "sock_inode_cache": "socket_alloc",
    "uid_cache": "user_struct",
}
"""Maps the name of a cache to the tag of the structures in it, where these differ."""

_CUT = ("task_struct", "kmem_cache")
"""Structures of which only the part in use is allocated: their ends are arrays for the
state of the FPU (arch_task_struct_size), and for the nodes of NUMA."""


_MAX_BYTES = 4096
_NAMES = 3
"""Of one object: bytes that are looked at, and names that are listed."""


class SlabObjects:
    """Finds slab objects."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._prog = lookup.prog

    def find(self, address: int) -> SlabPlace | None:
        """Return the slab object at an address of the direct map.

        :return: ``None`` if there is none, or its slab cannot be read.
        """
        try:
            with drgn_lookups:
                info = ask(slab_object_info, self._prog, address)
                if info is None or not info.slab_cache:
                    return None
                cache = read_cache(self._lookup.reader, info.slab_cache.value_())
                shared = int(info.slab_cache.refcount.value_()) - 1
                start = int(info.address)
                in_slab = self._is_within(info.slab, start, cache)
        except NotSupportedError:
            return None
        except LOST as error:
            text = f"cannot read an object of a slab cache: {error}"
            self._lookup.losses.lose(Loss.SLABS, text)
            return None
        if not in_slab:
            return None
        return SlabPlace(
            cache=cache.name,
            object=Address(start),
            bytes=cache.size,
            offset=address - start,
            allocated=info.allocated,
            merged=max(shared, 0),
            merged_names=self._others(cache) if shared > 0 else (),
            object_bytes=self._object_bytes(info.slab_cache),
            points_to=self._points_to(cache, start) if info.allocated else (),
        )

    def _points_to(self, cache: SlabCache, start: int) -> tuple[str, ...]:
        """Return what an object of a general cache points to, of modules first."""
        if not cache.name.startswith("kmalloc"):
            return ()
        size = min(cache.size, _MAX_BYTES) // 8
        try:
            words = self._lookup.reader.words(start, size)
        except UNREADABLE:
            return ()
        symbols = self._lookup.symbols
        named = words[symbols.may_name(words)].tolist()
        found = [name for word in named if (name := symbols.name(word)) is not None]
        found.sort(key=lambda name: name.module is None)
        return tuple(dict.fromkeys(name.name for name in found))[:_NAMES]

    def cache_at(self, address: int) -> str | None:
        """Return the cache whose slab is at an address; ``None`` if unknown."""
        try:
            with drgn_lookups:
                cache = ask(find_containing_slab_cache, self._prog, address)
                return (
                    read_cache(self._lookup.reader, cache.value_()).name
                    if cache
                    else None
                )
        except LOST:
            return None

    def _others(self, cache: SlabCache) -> tuple[str, ...]:
        """Return the names of the caches that were merged with another one."""
        return tuple(sorted({*self._aliases.get(cache.address, ())} - {cache.name}))

    @cached_property
    def _aliases(self) -> Mapping[int, list[str]]:
        return merged_names(self._lookup.reader, self._lookup.losses)

    @staticmethod
    def _object_bytes(cache: drgn.Object) -> int | None:
        try:
            with drgn_lookups:
                return int(cache.object_size.value_())
        except UNREADABLE:
            return None

    def _is_within(self, slab: drgn.Object, start: int, cache: SlabCache) -> bool:
        """Return whether an object is in front of the unused end of its slab."""
        try:
            with drgn_lookups:
                count = int(slab.objects.value_())
        except MissingMemberError:
            return True  # SLAB, up to v6.7, does not keep it
        first: int = (
            ask(page_to_virt, cast("struct page *", slab)).value_() + cache.padding
        )
        return 0 <= start - first < count * cache.size

    def type_of(self, found: SlabPlace) -> drgn.Type | None:
        """Return the type of the objects of a cache; ``None`` if it is not certain.

        A cache that is shared has objects of several types.
        """
        if found.merged:
            return None
        name = TYPES.get(found.cache, found.cache)
        if not name.isidentifier():
            return None
        try:
            type_ = find_type(self._prog, f"struct {name}")
        except MissingError:
            return None
        if not type_.is_complete():
            return None
        fits = drgn.sizeof(type_) <= found.bytes or type_.tag in _CUT
        return type_ if fits else None
