# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that hold a guest's memory, and not where its kernel is.

:mod:`.memory` has what every such file is read by, :mod:`.search` finds VMCOREINFO in
it, :mod:`.candidates` proves what was found, :mod:`.layout` says which address of the
guest lies where, and :mod:`.program` makes a drgn program of it.
"""
