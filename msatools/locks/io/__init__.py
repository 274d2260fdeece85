# SPDX-License-Identifier: LGPL-2.1-or-later

"""I/O in flight: requests and bios of disks, down stacked disks to the hardware."""
