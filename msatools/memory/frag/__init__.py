# SPDX-License-Identifier: LGPL-2.1-or-later

"""How free memory is cut up, and what keeps blocks from being whole."""
