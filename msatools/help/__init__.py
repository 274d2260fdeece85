# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa help``: the guides and the pages on commands, which are installed."""
