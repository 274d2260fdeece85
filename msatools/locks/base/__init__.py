# SPDX-License-Identifier: LGPL-2.1-or-later

"""What every part of locks/ stands on: tasks, stacks, locks as found, the context."""
