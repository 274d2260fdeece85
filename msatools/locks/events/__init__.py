# SPDX-License-Identifier: LGPL-2.1-or-later

"""Events that tasks wait for: completions, wait queues, pages, bits."""
