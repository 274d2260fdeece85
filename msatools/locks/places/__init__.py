# SPDX-License-Identifier: LGPL-2.1-or-later

"""The variable, structure or slab object that contains a lock."""
