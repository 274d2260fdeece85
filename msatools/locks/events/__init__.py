# SPDX-License-Identifier: LGPL-2.1-or-later

"""Events: completions, wait queues, page bits, and bits of other words."""
