# SPDX-License-Identifier: LGPL-2.1-or-later

"""What all of locks/ shares: tasks, stacks, locks, the context of a snapshot."""
