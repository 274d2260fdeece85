# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for that is no task: devices, servers."""
