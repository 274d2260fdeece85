# SPDX-License-Identifier: LGPL-2.1-or-later

"""What locks lie in: variables, known structures, objects of slabs."""
