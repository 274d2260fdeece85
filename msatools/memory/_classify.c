// SPDX-License-Identifier: LGPL-2.1-or-later

/*
 * The scan's inner loops: one pass over struct pages instead of several numpy passes of
 * classify.py and sums.py. The numpy code is the definition; this has the same result for
 * each page, even a damaged one. classify.py has the reasons for the order of the tests,
 * and the commits of the kernel.
 *
 * The layout of struct page, the codes of classes and all memory come from compiled.py,
 * which defines the same two structs. The data is untrusted: an index from a struct page
 * is compared with the number of pages before its use.
 */

#define _XOPEN_SOURCE 700 /* pread() */

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define MAX_ORDER 20 /* as in classify.py */
#define LEAST_PIECE 1024 /* pages that are read at once behind a free block */
#define SKIPPED 255 /* code of pages that were not read, until their block is known */

/* All members have 8 bytes, so that there is no padding. */
struct layout {
	/* Offsets within struct page. */
	int64_t size, flags, compound_head, mapping, private, mapcount, refcount;
	int64_t entire_mapcount; /* in the first tail's struct page */
	/* Masks of page->flags. */
	uint64_t head, reserved, hwpoison, slab, swapbacked, swapcache;
	/* Page types: PageTypes in layout.py. */
	uint64_t lowest, shift, mask;
	const uint8_t *type_classes; /* mask + 1 elements */
	const uint8_t *mapping_classes; /* 16 elements */
	/* HugetlbMark in layout.py; mark_size is 0 without one. */
	int64_t mark, mark_size;
	uint64_t mark_mask, mark_value;
	uint64_t compound_mask, fake_heads, large_kmalloc_type; /* booleans */
	/* Codes of classes, each a byte. */
	uint64_t unattributed, free_buddy, free_hugetlb, anon, ksm, hugetlb, file, shmem;
	uint64_t slab_class, large_kmalloc, reserved_class, poisoned, excluded;
};

/* Consecutive tails of compound pages that have the same compound_head. */
struct tails {
	int64_t first, count;
	int64_t head; /* compound_head; then the index of the head */
};

struct scan {
	struct layout is;
	/* The current block; its data must stay in place until it is summed. */
	const uint8_t *data;
	int64_t pages;
	uint64_t pfn, address;
	uint64_t flags_or, flags_and; /* OR and AND of all pages' flags */
	/* Columns of the block, one element a page: see Block in classify.py. */
	uint64_t *mapping; /* only if own_mapping */
	uint8_t *codes;
	uint32_t *heads; /* index of the head, or of the page itself */
	/* Lists of pages; tails have twice the room, and end with the fake heads. */
	int64_t *notable, *zeros, *tails, *tail_heads;
	int64_t notables, zeroes, ntails, nfakes;
	struct tails *tail_runs; /* the same as tails and tail_heads, which Python has */
	int64_t ntail_runs;
	/* Booleans; swappable: pages may be unmapped, or of the swap cache. */
	int64_t own_mapping, swappable;
	uint32_t *runs; /* first page of each run of pages that are alike, tails among them */
	int64_t nruns, next_run;
	/* Scratch space of each step, one element a page. */
	uint8_t *scratch_codes;
	uint64_t *scratch;
	/* The lowest and highest head outside the block; class and mapping if single. */
	int64_t far_low, far_high;
	uint64_t far_code, far_mapping;
	/* Results of msa_sum(): pages by class, 256 elements; runs of cached pages. */
	int64_t *counts, anon_unmapped, anon_swapcache, shmem_swapcache, nameless;
	uint64_t *cache_mappings;
	int64_t *cache_pages, cache_runs;
};

/* Blocks of a dump's file, and what is found in them: see FileScan in stream.py. */
struct stream {
	int64_t fd;
	/* Each block, and from where in the file its struct pages are, in runs. */
	const uint64_t *pfns, *addresses;
	const int64_t *pages, *first_run, *run_offset, *run_bytes;
	int64_t next;
	uint8_t *buffer; /* for one block */
	const uint64_t *owned; /* pfns, ascending */
	const uint8_t *owned_codes;
	int64_t nowned;
	uint64_t rings, zone_shift, zone_mask, device_zone, kernel_start;
	uint64_t least_order; /* of free blocks of which only both ends are read; or 0 */
	int64_t lru; /* offset of the list node */
	/* Results, of one node and zone. */
	uint64_t key;
	int64_t done, left, reads, bytes, room, candidates, nentries; /* left: a boolean */
	uint64_t *nexts, *prevs, *nodes;
	int64_t *rooms;
	uint8_t *candidate_codes;
	uint64_t *entries;
	int64_t *orphans; /* scratch space, one element a page */
};

static inline uint64_t u64(const uint8_t *at)
{
	uint64_t word;
	return *(uint64_t *)memcpy(&word, at, sizeof(word));
}

static inline uint32_t u32(const uint8_t *at)
{
	uint32_t word;
	return *(uint32_t *)memcpy(&word, at, sizeof(word));
}

static inline const uint8_t *page(const struct scan *s, int64_t i)
{
	return s->data + i * s->is.size;
}

/* Return the class of a page by its own flags, type and mapping. */
static inline uint8_t class_of(const struct layout *is, uint64_t flags,
			       uint64_t mapping, uint32_t word)
{
	int swapbacked = (flags & is->swapbacked) != 0;
	int key = (int)(mapping & 3) | (mapping != 0) << 2 | swapbacked << 3;
	uint8_t code = is->mapping_classes[key];

	if (key == 8 && (flags & is->swapcache) == is->swapcache)
		code = (uint8_t)is->anon;
	if (flags & is->reserved)
		code = (uint8_t)is->reserved_class;
	if (word + 1 > is->lowest) { /* -1 wraps round to 0 */
		uint8_t type = is->type_classes[word >> is->shift & is->mask];

		if (type != is->unattributed)
			code = type;
	}
	return flags & is->slab ? (uint8_t)is->slab_class : code;
}

/* Begin a block: nothing is known of its pages. */
static void begin(struct scan *s, const uint8_t *data, int64_t pages, uint64_t pfn,
		  uint64_t address)
{
	s->data = data;
	s->pages = pages;
	s->pfn = pfn;
	s->address = address;
	s->flags_or = 0;
	s->flags_and = UINT64_MAX;
	/* All are their own heads again. */
	for (const struct tails *run = s->tail_runs; s->ntail_runs; run++, s->ntail_runs--)
		for (int64_t i = run->first; i < run->first + run->count; i++)
			s->heads[i] = (uint32_t)i;
	s->notables = s->zeroes = s->ntails = s->nfakes = s->own_mapping = 0;
	s->swappable = s->nruns = 0;
}

/*
 * Return how many pages from p on are like the one before: was[] has its flags, mapping,
 * type and compound_head; of the last, bits of info_mask are compared.
 */
static inline int64_t count_same(const uint8_t *p, int64_t pages, int64_t size,
				 int64_t flags, int64_t info, int64_t mapping,
				 int64_t mapcount, const uint64_t was[4],
				 uint64_t info_mask)
{
	const uint64_t flags_was = was[0], mapping_was = was[1], info_was = was[3];
	const uint32_t word_was = (uint32_t)was[2];
	int64_t i = 0;

	for (; i < pages; i++, p += size)
		if ((u64(p + flags) ^ flags_was) | (u64(p + mapping) ^ mapping_was) |
		    (u32(p + mapcount) ^ word_was) |
		    ((u64(p + info) ^ info_was) & info_mask))
			break;
	return i;
}

static int64_t count_like(const struct layout *is, const uint8_t *p, int64_t pages,
			  const uint64_t was[4], uint64_t info_mask)
{
	/* Constants, as most kernels have them, leave the loop more registers. */
	if (is->size == 64 && is->flags == 0 && is->compound_head == 8 &&
	    is->mapping == 24 && is->mapcount == 48)
		return count_same(p, pages, 64, 0, 8, 24, 48, was, info_mask);
	return count_same(p, pages, is->size, is->flags, is->compound_head, is->mapping,
			  is->mapcount, was, info_mask);
}

/* Classify each of some pages by itself; list the pages that later steps need. */
static void look_at_each(struct scan *s, int64_t first, int64_t end)
{
	const struct layout is = s->is;
	const uint64_t bits = is.head | is.reserved | is.hwpoison | is.slab;
	const uint8_t *p = page(s, first);
	uint8_t *restrict codes = s->codes;
	int64_t *notable = s->notable + s->notables, *zeros = s->zeros + s->zeroes;
	struct tails *tails = s->tail_runs + s->ntail_runs;
	uint32_t *run = s->runs + s->nruns;
	/* Most pages are like the one before: only their class is stored. */
	uint64_t any = s->flags_or, all = s->flags_and, last_flags = 0, last_mapping = 0;
	uint32_t last_word = 0;
	uint8_t code = 0, plain = 0;

	for (int64_t i = first, same; i < end; i += same, p += same * is.size) {
		uint64_t flags = u64(p + is.flags), mapping = u64(p + is.mapping);
		uint64_t info = u64(p + is.compound_head);
		uint32_t word = u32(p + is.mapcount);

		if (!plain || (flags ^ last_flags) | (mapping ^ last_mapping) |
				      (word ^ last_word)) {
			code = class_of(&is, flags, mapping, word);
			any |= flags;
			all &= flags;
			plain = !(flags & bits) && (flags | mapping | word);
			if (flags & bits)
				*notable++ = i;
			if (!(flags | mapping | info | word) && !u32(p + is.refcount))
				*zeros++ = i;
			last_flags = flags;
			last_mapping = mapping;
			last_word = word;
			/* What add_swappable() has to look for. */
			s->swappable |= (flags & is.swapcache) == is.swapcache;
			s->swappable |= word == UINT32_MAX &&
					(code == is.anon || code == is.ksm);
		}
		*run++ = (uint32_t)i;
		codes[i] = code;
		same = 1;
		/* With compound_mask, tails of several heads may have the same word. */
		if (plain && !(info & 1 && is.compound_mask)) {
			const uint64_t was[] = {flags, mapping, word, info};
			const uint64_t tail = info & 1;

			same += count_like(&is, p + is.size, end - i - 1, was, -tail | 1);
			memset(codes + i, code, (size_t)same);
		}
		if (info & 1)
			*tails++ = (struct tails){i, same, (int64_t)info};
	}
	s->nruns = run - s->runs;
	s->flags_or = any;
	s->flags_and = all;
	s->notables = notable - s->notable;
	s->zeroes = zeros - s->zeros;
	s->ntail_runs = tails - s->tail_runs;
}

/* Copy the mappings, which are about to differ from the struct pages. */
static void own_mapping(struct scan *s)
{
	for (int64_t i = 0; !s->own_mapping && i < s->pages; i++)
		s->mapping[i] = u64(page(s, i) + s->is.mapping);
	s->own_mapping = 1;
}

/* Distinguish hugetlb from kernel pages, and fake heads from real ones. */
static void compound_heads(struct scan *s)
{
	const struct layout *is = &s->is;

	for (int64_t k = 0; k < s->notables; k++) {
		int64_t i = s->notable[k];
		const uint8_t *p = page(s, i), *second = p + is->size;
		uint64_t named, own = s->address + (uint64_t)(i * is->size) + 1;
		uint8_t *code = &s->codes[i];

		if (i + 1 >= s->pages || !(u64(p + is->flags) & is->head))
			continue;
		named = u64(second + is->compound_head);
		if (is->fake_heads && named & 1 && named != own) {
			s->tail_runs[s->ntail_runs++] =
				(struct tails){i, 1, (int64_t)named};
			s->nfakes++;
			continue;
		}
		if (is->mark_size && *code != is->slab_class) {
			const uint8_t *at = second + is->mark;
			uint64_t mark = is->mark_size == 8 ? u64(at) : *at;

			if ((mark & is->mark_mask) == is->mark_value)
				*code = (uint8_t)is->hugetlb;
		}
		if (*code == is->hugetlb && !u32(p + is->refcount))
			*code = (uint8_t)is->free_hugetlb;
		if (*code == is->unattributed && !is->large_kmalloc_type &&
		    u32(p + is->refcount) == 1)
			*code = (uint8_t)is->large_kmalloc;
	}
}

/* Convert compound_head of tails to indices; count heads outside the block. */
static int64_t find_heads(struct scan *s)
{
	const int64_t size = s->is.size;
	uint64_t offset = 0;
	int64_t head = 0, far = 0;

	s->far_low = INT64_MAX;
	s->far_high = INT64_MIN;
	for (int64_t k = 0; k < s->ntail_runs; k++) {
		struct tails *run = &s->tail_runs[k];
		uint64_t word = (uint64_t)run->head, was = offset;
		uint64_t own = s->address + (uint64_t)(run->first * size);

		offset = (s->is.compound_mask ? word & own : word - 1) - s->address;
		if (offset != was) /* neighbours have the same head, and division is slow */
			head = (int64_t)offset / size - ((int64_t)offset % size < 0);
		run->head = head;
		if (head < 0 || head >= s->pages) {
			far += run->count;
			s->far_low = head < s->far_low ? head : s->far_low;
			s->far_high = head > s->far_high ? head : s->far_high;
		}
	}
	return far;
}

/* List each tail, and the index of its head. */
static void list_tails(struct scan *s)
{
	s->ntails = 0;
	for (int64_t k = 0; k < s->ntail_runs; k++) {
		const struct tails *run = &s->tail_runs[k];

		for (int64_t i = run->first; i < run->first + run->count; i++) {
			s->tails[s->ntails] = i;
			s->tail_heads[s->ntails++] = run->head;
		}
	}
}

/* Copy class and mapping of heads to tails, as they were before this step. */
static void settle_tails(struct scan *s)
{
	int copied = 0, swappable = 0;

	for (int64_t k = 0; s->far_low == s->far_high && k < s->ntail_runs; k++) {
		const struct tails *run = &s->tail_runs[k];

		if (run->head != s->far_low)
			continue;
		memset(s->codes + run->first, (int)s->far_code, (size_t)run->count);
		for (int64_t i = run->first; i < run->first + run->count; i++)
			s->mapping[i] = s->far_mapping;
	}
	memcpy(s->scratch_codes, s->codes, (size_t)s->pages);
	for (int64_t k = 0; k < s->ntail_runs; k++) {
		const struct tails *run = &s->tail_runs[k];
		const int64_t end = run->first + run->count;
		const int is_far = run->head < 0 || run->head >= s->pages;
		const int64_t head = run->head < 0 ? 0 : is_far ? s->pages - 1 : run->head;
		const uint8_t code = s->scratch_codes[head];

		for (int64_t i = run->first; i < end; i++)
			s->heads[i] = (uint32_t)head;
		if (is_far)
			continue;
		memset(s->codes + run->first, code, (size_t)run->count);
		swappable |= code == s->is.anon || code == s->is.shmem || code == s->is.ksm;
		if (code != s->is.file)
			continue;
		if (!copied++) {
			own_mapping(s);
			memcpy(s->scratch, s->mapping, (size_t)s->pages * sizeof(uint64_t));
		}
		for (int64_t i = run->first; i < end; i++)
			s->mapping[i] = s->scratch[head];
	}
	s->swappable |= swappable;
}

/* Copy the class of a free block's first page to its other pages. */
static void spread_free(struct scan *s)
{
	const int code = (int)s->is.free_buddy;
	int64_t firsts = 0, filled[MAX_ORDER + 1];
	const uint8_t *end = s->codes + s->pages, *at = s->codes;

	while ((at = memchr(at, code, (size_t)(end - at))))
		s->scratch[firsts++] = (uint64_t)(at++ - s->codes);
	memset(filled, -1, sizeof(filled));
	for (int64_t k = 0; k < firsts; k++) {
		int64_t i = (int64_t)s->scratch[k];
		uint64_t order = u64(page(s, i) + s->is.private);
		int64_t count = (int64_t)1 << (order > MAX_ORDER ? 0 : order);

		if (count == 1 || s->pages % count || s->pfn % (uint64_t)count ||
		    filled[order] == i / count)
			continue;
		filled[order] = i / count;
		memset(s->codes + i / count * count, code, (size_t)count);
	}
}

/*
 * Do the rest of classify(), except gaps. If all heads outside the block are the same
 * one, far_code and far_mapping are its class and mapping; otherwise the caller has set
 * those of the tails already.
 */
void msa_settle(struct scan *s)
{
	const struct tails *end = s->tail_runs + s->ntail_runs, *fake = end - s->nfakes;

	if (s->ntail_runs)
		settle_tails(s);
	spread_free(s);
	for (int64_t k = 0; s->is.hwpoison && k < s->notables; k++) {
		int64_t i = s->notable[k];

		while (fake < end && fake->first < i)
			fake++;
		if (u64(page(s, i) + s->is.flags) & s->is.hwpoison &&
		    (fake == end || fake->first != i))
			s->codes[i] = (uint8_t)s->is.poisoned;
	}
	for (int64_t k = 0; k < s->zeroes; k++)
		s->codes[s->zeros[k]] = (uint8_t)s->is.excluded;
}

/*
 * Classify the pages of a block. Return the number of tails whose heads are outside the
 * block: if there are any, the caller must call msa_settle(); otherwise all is done.
 */
int64_t msa_classify(struct scan *s, const uint8_t *data, int64_t pages, uint64_t pfn,
		     uint64_t address)
{
	int64_t far;

	begin(s, data, pages, pfn, address);
	look_at_each(s, 0, pages);
	compound_heads(s);
	far = find_heads(s);
	list_tails(s);
	if (far) {
		own_mapping(s);
		s->swappable = 1;
	} else
		msa_settle(s);
	return far;
}

/* Add page-cache pages to the runs of those with the same mapping. */
static void add_cached(struct scan *s, int64_t first, int64_t end)
{
	/* The mappings are in a separate array or in the struct pages. */
	const uint8_t *array = s->own_mapping ? (const uint8_t *)s->mapping
					      : s->data + s->is.mapping;
	const int64_t step = s->own_mapping ? (int64_t)sizeof(*s->mapping) : s->is.size;
	int64_t n = s->cache_runs;

	for (int64_t i = first, run; i < end; i = run) {
		uint64_t mapping = u64(array + i * step);

		/* Pages that are alike have the same mapping. */
		while (s->next_run < s->nruns && s->runs[s->next_run] <= i)
			s->next_run++;
		run = s->next_run < s->nruns ? s->runs[s->next_run] : s->pages;
		run = run < end ? run : end;
		if (!n || s->cache_mappings[n - 1] != mapping) {
			s->cache_mappings[n] = mapping;
			s->cache_pages[n++] = 0;
		}
		s->cache_pages[n - 1] += run - i;
	}
	s->cache_runs = n;
}

/* Count unmapped pages, and pages of the swap cache. */
static void add_swappable(struct scan *s, int64_t first, int64_t end, int anon)
{
	const struct layout is = s->is;
	const uint32_t *heads = s->ntail_runs ? s->heads : NULL;

	for (int64_t i = first; i < end; i++) {
		int64_t head = heads ? heads[i] : i;
		uint64_t flags = u64(page(s, head) + is.flags);

		if (anon && u32(page(s, i) + is.mapcount) == UINT32_MAX) {
			int whole = flags & is.head && head + 1 < s->pages &&
				    u32(page(s, head + 1) + is.entire_mapcount) < 1u << 31;

			s->anon_unmapped += !whole;
		}
		if ((flags & is.swapcache) != is.swapcache)
			continue;
		s->anon_swapcache += anon;
		s->shmem_swapcache += !anon;
		s->nameless += anon && !(s->own_mapping ? s->mapping[head]
							: u64(page(s, head) + is.mapping));
	}
}

/* Set all sums to zero. */
static void clear_sums(struct scan *s)
{
	s->anon_unmapped = s->anon_swapcache = s->shmem_swapcache = 0;
	s->cache_runs = s->nameless = 0;
	memset(s->counts, 0, 256 * sizeof(*s->counts));
}

/* Add pages to the sums by their current classes. */
static void add_sums(struct scan *s, int64_t first, int64_t end)
{
	s->next_run = 0;
	for (int64_t i = first, next; i < end; i = next) {
		uint8_t code = s->codes[i];
		int anon = code == s->is.anon || code == s->is.ksm;

		for (next = i; next + 8 <= end; next += 8)
			if (u64(s->codes + next) != code * 0x0101010101010101u)
				break;
		while (next < end && s->codes[next] == code)
			next++;
		s->counts[code] += next - i;
		if (code == s->is.file)
			add_cached(s, i, next);
		else if (s->swappable && (anon || code == s->is.shmem))
			add_swappable(s, i, next, anon);
	}
}

/* Sum up pages by their current classes: sums.py adds this to the result. */
void msa_sum(struct scan *s, int64_t first, int64_t end)
{
	clear_sums(s);
	add_sums(s, first, end);
}

/*
 * The rest scans many blocks in one call, straight from the dump's file. A block that
 * needs more than its struct pages is left to Python; so is what must not go wrong.
 */

/* Read a part of the next block into its place in the buffer; return whether it was. */
static int read_part(struct stream *st, int64_t at, int64_t bytes)
{
	uint8_t *to = st->buffer + at;

	for (int64_t r = st->first_run[st->next]; bytes; r++) {
		int64_t within, size;

		if (r >= st->first_run[st->next + 1])
			return 0;
		within = at < st->run_bytes[r] ? at : st->run_bytes[r];
		size = st->run_bytes[r] - within;
		size = size < bytes ? size : bytes;
		at -= within;
		if (!size)
			continue;
		if (pread((int)st->fd, to, (size_t)size, st->run_offset[r] + within) != size)
			return 0;
		st->reads++;
		st->bytes += size;
		to += size;
		bytes -= size;
	}
	return 1;
}

/* Return whether a page is like one within a free block, and like its first page. */
static int is_tail_of_free(const struct scan *s, const uint8_t *p, const uint8_t *first,
			   uint64_t zone_shift)
{
	const struct layout *is = &s->is;
	const uint64_t flags = u64(p + is->flags), mapping = u64(p + is->mapping);
	const uint64_t bits = is->head | is->reserved | is->hwpoison | is->slab;

	return !(flags & bits) && !((flags ^ u64(first + is->flags)) >> zone_shift) &&
	       !(u64(p + is->compound_head) & 1) && !u32(p + is->refcount) &&
	       class_of(is, flags, mapping, u32(p + is->mapcount)) == is->unattributed;
}

/*
 * Return the pages of the free block that begins at page i, which has been read, if it
 * is so large that not reading it pays; 0 otherwise. Its last page is read.
 */
static int64_t skip(struct scan *s, struct stream *st, int64_t i)
{
	const struct layout *is = &s->is;
	const uint8_t *first = page(s, i);
	const uint64_t flags = u64(first + is->flags), order = u64(first + is->private);
	const uint64_t bits = is->head | is->reserved | is->hwpoison | is->slab;
	const uint64_t mapping = u64(first + is->mapping);
	int64_t count, last;

	if (order < st->least_order || order > MAX_ORDER || flags & bits ||
	    u64(first + is->compound_head) & 1 ||
	    class_of(is, flags, mapping, u32(first + is->mapcount)) != is->free_buddy)
		return 0;
	count = (int64_t)1 << order;
	last = i + count - 1;
	/* As spread_free() has it; a multiple of a power of two does not lead beyond. */
	if (s->pages % count || s->pfn % (uint64_t)count || i % count)
		return 0;
	/* The page behind comes along: most likely it begins another free block. */
	if (!read_part(st, last * is->size, (last + 1 < s->pages ? 2 : 1) * is->size))
		return 0;
	if (!is_tail_of_free(s, page(s, last), first, st->zone_shift))
		return 0;
	look_at_each(s, i, i + 1);
	look_at_each(s, last, last + 1);
	memset(s->codes + i + 1, SKIPPED, (size_t)(count - 2));
	return count;
}

/* Read the next block, except the inside of free blocks, and look at each page. */
static int read_block(struct scan *s, struct stream *st)
{
	const int64_t size = s->is.size;
	int64_t i = 0, piece = s->pages, skipped = 0;

	if (st->least_order && !read_part(st, 0, size))
		return -1;
	while (i < s->pages) {
		int64_t count = st->least_order ? skip(s, st, i) : 0;

		if (count) {
			skipped += count;
			piece = LEAST_PIECE;
		} else {
			/* Where some memory is free, more may follow. */
			count = s->pages - i < piece ? s->pages - i : piece;
			if (!read_part(st, i * size, count * size))
				return -1;
			look_at_each(s, i, i + count);
			piece *= 2;
			if (i + count < s->pages && !read_part(st, (i + count) * size, size))
				return -1;
		}
		i += count;
	}
	return skipped != 0;
}

/* Return whether a page that was not read matters to another one, as with damage. */
static int misses_pages(const struct scan *s)
{
	for (int64_t k = 0; k < s->ntail_runs; k++)
		if (s->codes[s->tail_runs[k].head] == SKIPPED)
			return 1;
	return 0;
}

/* Apply owners, as _apply_owners() in sums.py does. */
static void apply_owners(struct scan *s, struct stream *st)
{
	const struct layout *is = &s->is;
	const uint64_t end = s->pfn + (uint64_t)s->pages;
	int64_t low = 0, high = st->nowned, heads = 0;

	while (low < high) {
		int64_t middle = low + (high - low) / 2;

		if (st->owned[middle] < s->pfn)
			low = middle + 1;
		else
			high = middle;
	}
	for (; low < st->nowned && st->owned[low] < end; low++) {
		int64_t i = (int64_t)(st->owned[low] - s->pfn);
		uint8_t code = s->codes[i], owner = st->owned_codes[low];

		if (code != is->unattributed &&
		    (code != is->large_kmalloc || is->large_kmalloc_type) &&
		    (code != is->file || owner != st->rings))
			continue;
		s->codes[i] = owner;
		if (!(u64(page(s, i) + is->flags) & is->head))
			continue;
		if (!heads++)
			memset(s->scratch, 0, (size_t)s->pages * sizeof(*s->scratch));
		s->scratch[i] = 1;
	}
	if (!heads)
		return;
	memcpy(s->scratch_codes, s->codes, (size_t)s->pages);
	for (int64_t k = 0; k < s->ntail_runs; k++) {
		const struct tails *run = &s->tail_runs[k];

		if (s->scratch[run->head])
			memset(s->codes + run->first, s->scratch_codes[run->head],
			       (size_t)run->count);
	}
}

static inline int is_link(uint64_t word, uint64_t kernel_start)
{
	return !(word & 7) && word >= kernel_start;
}

/* List the unreferenced pages without a class. */
static int64_t find_orphans(const struct scan *s, int64_t *orphans)
{
	const uint8_t *end = s->codes + s->pages, *at = s->codes;
	const int code = (int)s->is.unattributed;
	int64_t n = 0;

	while ((at = memchr(at, code, (size_t)(end - at)))) {
		int64_t i = at++ - s->codes;

		if (!u32(page(s, i) + s->is.refcount))
			orphans[n++] = i;
	}
	return n;
}

/* Add those that are on a list to the candidates: _add_candidates() in sums.py. */
static void add_candidates(struct scan *s, struct stream *st, const int64_t *orphans,
			   int64_t count)
{
	int64_t n = st->candidates;

	for (int64_t k = 0, end = 0; k < count; k++) {
		int64_t i = orphans[k], rooms;
		const uint8_t *links = page(s, i) + st->lru;
		uint64_t next = u64(links), pfn = s->pfn + (uint64_t)i;
		uint64_t node = s->address + (uint64_t)(i * s->is.size + st->lru);

		if (k >= end) /* the next run of consecutive orphans */
			for (end = k + 1; end < count && orphans[end] == orphans[end - 1] + 1;)
				end++;
		if (!is_link(next, st->kernel_start) || next == node)
			continue;
		rooms = end - k;
		if (pfn && rooms > (int64_t)(pfn & -pfn))
			rooms = (int64_t)(pfn & -pfn);
		st->nexts[n] = next;
		st->prevs[n] = u64(links + 8);
		st->nodes[n] = node;
		st->candidate_codes[n] = s->codes[i];
		st->rooms[n++] = rooms;
	}
	st->candidates = n;
}

/* Add the swap entries of anonymous pages without a mapping: nameless_swap(). */
static void add_entries(struct scan *s, struct stream *st)
{
	const struct layout *is = &s->is;

	for (int64_t i = 0; i < s->pages; i++) {
		int64_t head = s->ntail_runs ? s->heads[i] : i;
		const uint8_t *p = page(s, head);
		uint64_t mapping;

		if (s->codes[i] != is->anon)
			continue;
		mapping = s->own_mapping ? s->mapping[head] : u64(p + is->mapping);
		if (!mapping && (u64(p + is->flags) & is->swapcache) == is->swapcache)
			st->entries[st->nentries++] = u64(p + is->private);
	}
}

/*
 * Classify and sum up the next block; return whether it was. If not, it is of another
 * node or zone than those before, or left to Python.
 */
static int add_block(struct scan *s, struct stream *st)
{
	const int64_t next = st->next;
	const uint64_t least_order = st->least_order;
	int64_t norphans, nameless = s->nameless;
	uint64_t key;
	int skipped;

	begin(s, st->buffer, st->pages[next], st->pfns[next], st->addresses[next]);
	skipped = read_block(s, st);
	st->left = 1;
	if (skipped < 0)
		return 0;
	compound_heads(s);
	if (find_heads(s))
		return 0;
	if (skipped && misses_pages(s)) {
		st->least_order = 0;
		begin(s, s->data, s->pages, s->pfn, s->address);
		skipped = read_block(s, st);
		st->least_order = least_order;
		if (skipped < 0)
			return 0;
		compound_heads(s);
		if (find_heads(s))
			return 0;
	}
	msa_settle(s);
	key = s->flags_or >> st->zone_shift;
	if (s->zeroes || key != s->flags_and >> st->zone_shift ||
	    (key & st->zone_mask) == st->device_zone)
		return 0;
	st->left = 0;
	if (st->done && key != st->key)
		return 0;
	st->key = key;
	norphans = find_orphans(s, st->orphans);
	apply_owners(s, st);
	add_candidates(s, st, st->orphans, norphans);
	add_sums(s, 0, s->pages);
	if (s->nameless != nameless)
		add_entries(s, st);
	return 1;
}

/*
 * Scan blocks from the next one on, while they are of the same node and zone. The caller
 * calls again, after it has scanned the next block itself if that is left to it. All sums
 * are of this call.
 */
void msa_stream(struct scan *s, struct stream *st, int64_t end)
{
	clear_sums(s);
	st->done = st->left = st->candidates = st->nentries = st->reads = st->bytes = 0;
	for (; st->next < end; st->next++, st->done++) {
		const int64_t pages = st->pages[st->next];

		if (st->candidates + pages > st->room || s->cache_runs + pages > st->room ||
		    st->nentries + pages > st->room)
			return;
		if (!add_block(s, st))
			return;
	}
}

/* The sizes of all structs, for compiled.py to compare with its own. */
int64_t msa_size(void)
{
	return (int64_t)(sizeof(struct layout) << 32 | sizeof(struct scan) << 16 |
			 sizeof(struct stream));
}
