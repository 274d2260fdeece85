# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports as files: read again, and compared."""
