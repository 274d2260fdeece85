# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for that nobody takes: completions, wait queues, pages, bits."""
