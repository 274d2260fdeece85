# SPDX-License-Identifier: LGPL-2.1-or-later

"""The pass over the memmap: what it reads, sums up and settles."""
