# SPDX-License-Identifier: LGPL-2.1-or-later

"""What holds up CPUs, and who waits for them."""
