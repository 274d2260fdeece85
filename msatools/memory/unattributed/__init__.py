# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages without a known owner, and hints about their users."""
