# SPDX-License-Identifier: LGPL-2.1-or-later

"""Servers of waits that are no locks: FUSE file systems, mapped disks."""
