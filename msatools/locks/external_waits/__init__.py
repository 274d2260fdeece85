# SPDX-License-Identifier: LGPL-2.1-or-later

"""What serves waits and is no lock: FUSE file systems, mapped disks."""
