# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's own locks: who waits for them, and who has them."""
