# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's own locks: waiters and owners."""
