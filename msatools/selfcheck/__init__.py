# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--self-check``: whether the numbers of the commands agree on a kernel."""
