# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that no owner explains, and what may tell whose they are."""
