// SPDX-License-Identifier: LGPL-2.1-or-later

/*
 * Decompression of the pages of a kdump: many in one call, each straight to its place.
 *
 * The blocks are untrusted: whatever is in one, nothing beyond it is read and nothing
 * beyond its page is written. A block counts only if it is whole, ends where it should,
 * and makes exactly one page; anything else is a lost page.
 *
 * The formats: zlib is RFC 1950 and 1951, LZO1X is Documentation/staging/lzo.rst of the
 * kernel's source, snappy is format_description.txt of its own; zstd is left to libzstd.
 * Loaded by kdump_pages.py.
 */

#include <stdint.h>
#include <string.h>

/* Bytes that are copied at once, so that a copy may write as many too many. */
#define STEP 16

static inline uint64_t load64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return value;
}

static inline void copy_step(uint8_t *to, const uint8_t *from)
{
	uint64_t low = load64(from), high = load64(from + 8);

	memcpy(to, &low, 8);
	memcpy(to + 8, &high, 8);
}

/*
 * Repeat the bytes that are distance before to. The caller has checked that they are in the
 * page, and that there is room for length bytes before end, where the page ends.
 */
static inline void copy_match(uint8_t *to, uint64_t distance, uint64_t length,
			      const uint8_t *end)
{
	uint64_t room = (uint64_t)(end - to);

	if (room >= 2 * STEP) {
		uint64_t fast = length < room - STEP ? length : room - STEP;
		uint64_t period = distance;
		uint8_t *stop = to + fast;

		length -= fast;
		/* Once it was repeated, there is twice as much to repeat. */
		while (period < STEP && to < stop) {
			copy_step(to, to - period);
			to += period;
			period *= 2;
		}
		for (; to < stop; to += STEP)
			copy_step(to, to - period);
		to = stop;
	}
	for (; length; length--, to++)
		*to = *(to - distance);
}

/* Copy literals; the caller has checked that both sides have as many. */
static inline void copy_literals(uint8_t *to, const uint8_t *from, uint64_t length,
				 const uint8_t *to_end, const uint8_t *from_end)
{
	if (length <= STEP && to_end - to >= STEP && from_end - from >= STEP)
		copy_step(to, from);
	else
		memcpy(to, from, length);
}

/* LZO1X. */

/* Add to a length what follows it: 255 for each byte of zero, then another byte. */
static inline int long_length(const uint8_t **from, const uint8_t *end, uint64_t *length)
{
	const uint8_t *at = *from;

	while (at < end && !*at) {
		*length += 255;
		at++;
	}
	if (at == end)
		return 0;
	*length += *at++;
	*from = at;
	return 1;
}

static int unpack_lzo(const uint8_t *in, const uint8_t *in_end, uint8_t *out,
		      uint8_t *out_end)
{
	uint8_t *to = out;
	/* How many literals the last instruction ended with: 4 is a run of any length. */
	unsigned int state = 0;

	if (in < in_end && *in > 17) {
		uint64_t length = *in++ - 17u;

		if (length > (uint64_t)(in_end - in) || length > (uint64_t)(out_end - to))
			return 0;
		copy_literals(to, in, length, out_end, in_end);
		in += length;
		to += length;
		state = length < 4 ? (unsigned int)length : 4;
	}
	for (;;) {
		uint64_t length, distance;
		unsigned int code;

		if (in == in_end)
			return 0;
		code = *in++;
		if (code < 16 && !state) {
			length = code;
			if (!code) {
				length = 15;
				if (!long_length(&in, in_end, &length))
					return 0;
			}
			length += 3;
			if (length > (uint64_t)(in_end - in) ||
			    length > (uint64_t)(out_end - to))
				return 0;
			copy_literals(to, in, length, out_end, in_end);
			in += length;
			to += length;
			state = 4;
			continue;
		}
		if (code >= 64 || code < 16) {
			if (in == in_end)
				return 0;
			if (code >= 64) {
				length = (code >> 5) + 1;
				distance = ((uint64_t)*in++ << 3) + (code >> 2 & 7) + 1;
			} else {
				length = state == 4 ? 3 : 2;
				distance = ((uint64_t)*in++ << 2) + (code >> 2) +
					   (state == 4 ? 2049 : 1);
			}
			state = code & 3;
		} else {
			unsigned int most = code >= 32 ? 31 : 7;

			length = code & most;
			if (!length) {
				length = most;
				if (!long_length(&in, in_end, &length))
					return 0;
			}
			length += 2;
			if (in_end - in < 2)
				return 0;
			distance = (uint64_t)(in[0] | in[1] << 8) >> 2;
			state = in[0] & 3;
			in += 2;
			if (code >= 32) {
				distance += 1;
			} else {
				distance += (uint64_t)(code & 8) << 11;
				if (!distance)
					return in == in_end && to == out_end;
				distance += 16384;
			}
		}
		if (distance > (uint64_t)(to - out) || length > (uint64_t)(out_end - to))
			return 0;
		copy_match(to, distance, length, out_end);
		to += length;
		if (state > (uint64_t)(in_end - in) || state > (uint64_t)(out_end - to))
			return 0;
		for (unsigned int i = 0; i < state; i++)
			*to++ = *in++;
	}
}

/* Snappy. */

static int unpack_snappy(const uint8_t *in, const uint8_t *in_end, uint8_t *out,
			 uint8_t *out_end)
{
	uint8_t *to = out;
	uint64_t size = 0;
	unsigned int shift = 0, byte;

	do {
		if (in == in_end || shift > 28)
			return 0;
		byte = *in++;
		size |= (uint64_t)(byte & 0x7f) << shift;
		shift += 7;
	} while (byte & 0x80);
	if (size != (uint64_t)(out_end - out))
		return 0;
	while (in < in_end) {
		unsigned int tag = *in++, kind = tag & 3;
		uint64_t length, distance;

		if (!kind) {
			unsigned int more = (tag >> 2) >= 60 ? (tag >> 2) - 59 : 0;

			length = tag >> 2;
			if (more > (uint64_t)(in_end - in))
				return 0;
			if (more) {
				length = 0;
				for (unsigned int i = 0; i < more; i++)
					length |= (uint64_t)*in++ << 8 * i;
			}
			length++;
			if (length > (uint64_t)(in_end - in) ||
			    length > (uint64_t)(out_end - to))
				return 0;
			copy_literals(to, in, length, out_end, in_end);
			in += length;
			to += length;
			continue;
		}
		unsigned int bytes = kind == 3 ? 4 : kind;

		if (bytes > (uint64_t)(in_end - in))
			return 0;
		distance = 0;
		for (unsigned int i = 0; i < bytes; i++)
			distance |= (uint64_t)*in++ << 8 * i;
		length = (tag >> 2) + 1;
		if (kind == 1) {
			length = (tag >> 2 & 7) + 4;
			distance |= (uint64_t)(tag >> 5) << 8;
		}
		if (!distance || distance > (uint64_t)(to - out) ||
		    length > (uint64_t)(out_end - to))
			return 0;
		copy_match(to, distance, length, out_end);
		to += length;
	}
	return to == out_end;
}

/* Zlib. */

#define LITERALS 288
#define DISTANCES 32
#define LENGTH_CODES 19
#define LONGEST 15

/* Bits by which the first table is looked up; longer codes continue in another. */
#define LITERAL_BITS 10
#define DISTANCE_BITS 8
#define LENGTH_BITS 7

/* Entries of both tables: more than any code needs, and checked. */
#define LITERAL_ROOM 2048
#define DISTANCE_ROOM 1024

/*
 * An entry has the length of the code in bits 0 to 7, the number of bits that follow in
 * bits 8 to 11, and from bit 16 on a literal, the base of a length or of a distance, or
 * where another table begins.
 */
#define LITERAL 0x8000u
#define SPECIAL 0x4000u /* no length and no distance: */
#define TABLE 0x2000u	/* continued in another table, */
#define END 0x1000u	/* end of the block, or else invalid. */

struct bits {
	const uint8_t *next, *end;
	uint64_t value;
	/* Valid bits in value, and how many of all were made up beyond the end. */
	int have, fake;
};

struct code {
	int literal_bits, distance_bits;
	uint32_t literals[LITERAL_ROOM], distances[DISTANCE_ROOM];
};

/* Have at least 56 bits. */
static inline void refill(struct bits *bits)
{
	if (bits->end - bits->next >= 8) {
		bits->value |= load64(bits->next) << bits->have;
		bits->next += (63 - bits->have) >> 3;
		bits->have |= 56;
		return;
	}
	while (bits->have <= 55) {
		if (bits->next < bits->end)
			bits->value |= (uint64_t)*bits->next++ << bits->have;
		else
			bits->fake += 8;
		bits->have += 8;
	}
}

static inline uint32_t take(struct bits *bits, unsigned int count)
{
	uint32_t taken = (uint32_t)(bits->value & ((1u << count) - 1));

	bits->value >>= count;
	bits->have -= (int)count;
	return taken;
}

/*
 * Build the table of a code from the lengths of its symbols' codes, as zlib accepts them:
 * complete, or with a single code of one bit, or none.
 *
 * Returns the bits by which it is looked up, or 0.
 */
static int build(uint32_t *table, int room, int most, const uint8_t *lengths, int symbols,
		 const uint32_t *meanings)
{
	uint16_t counts[LONGEST + 1] = {0}, ends[LONGEST + 1], sorted[LITERALS];
	int longest = LONGEST, left = 1, size, end, at = 0, start = 0, prefix = -1, wide = 0;
	uint32_t code = 0;

	for (int i = 0; i < symbols; i++)
		counts[lengths[i]]++;
	while (longest && !counts[longest])
		longest--;
	ends[0] = 0;
	for (int i = 1; i <= LONGEST; i++) {
		left = 2 * left - counts[i];
		if (left < 0)
			return 0;
		ends[i] = (uint16_t)(i == 1 ? 0 : ends[i - 1] + counts[i - 1]);
	}
	if (left && longest > 1)
		return 0;
	for (int i = 0; i < symbols; i++)
		if (lengths[i])
			sorted[ends[lengths[i]]++] = (uint16_t)i;
	if (left) {
		table[0] = table[1] = SPECIAL | 1;
		if (longest)
			table[0] = meanings[sorted[0]] | 1;
		return 1;
	}
	if (most > longest)
		most = longest;
	/* Codes begin with their lowest bit, so that they are counted from their highest. */
	end = 1 << most;
	size = 1;
	for (int length = 1; length <= longest; length++) {
		if (length <= most) {
			/* Shorter codes go on with either value of this bit. */
			memcpy(table + size, table, (size_t)size * sizeof(*table));
			size *= 2;
		}
		for (int i = 0; i < counts[length]; i++) {
			uint32_t entry = meanings[sorted[at++]] | (uint32_t)length;
			uint32_t bit = 1u << (length - 1);

			if (length <= most) {
				table[code] = entry;
			} else {
				if ((int)(code & ((1u << most) - 1)) != prefix) {
					int used = counts[length] - i;

					prefix = (int)(code & ((1u << most) - 1));
					start = end;
					wide = length - most;
					while (used < 1 << wide && most + wide < longest)
						used = 2 * used + counts[most + ++wide];
					end += 1 << wide;
					if (end > room)
						return 0;
					table[prefix] = SPECIAL | TABLE |
							(uint32_t)wide << 8 |
							(uint32_t)start << 16;
				}
				for (uint32_t j = code >> most; j < 1u << wide;
				     j += 1u << (length - most))
					table[start + (int)j] = entry;
			}
			while (bit && code & bit) {
				code ^= bit;
				bit >>= 1;
			}
			code |= bit;
		}
	}
	return most;
}

struct inflater {
	uint32_t literal_meanings[LITERALS], distance_meanings[DISTANCES];
	uint32_t length_meanings[LENGTH_CODES];
	struct code fixed, dynamic;
	int has_fixed;
};

static void set_meanings(struct inflater *inflater)
{
	uint32_t base = 3;

	for (uint32_t i = 0; i < 256; i++)
		inflater->literal_meanings[i] = LITERAL | i << 16;
	inflater->literal_meanings[256] = SPECIAL | END;
	for (uint32_t i = 0; i < 28; i++) {
		uint32_t extra = i < 8 ? 0 : i / 4 - 1;

		inflater->literal_meanings[257 + i] = base << 16 | extra << 8;
		base += 1u << extra;
	}
	inflater->literal_meanings[285] = 258u << 16;
	inflater->literal_meanings[286] = inflater->literal_meanings[287] = SPECIAL;
	base = 1;
	for (uint32_t i = 0; i < 30; i++) {
		uint32_t extra = i < 4 ? 0 : i / 2 - 1;

		inflater->distance_meanings[i] = base << 16 | extra << 8;
		base += 1u << extra;
	}
	inflater->distance_meanings[30] = inflater->distance_meanings[31] = SPECIAL;
	for (uint32_t i = 0; i < LENGTH_CODES; i++)
		inflater->length_meanings[i] = i << 16;
	inflater->has_fixed = 0;
}

static const struct code *fixed_code(struct inflater *inflater)
{
	struct code *code = &inflater->fixed;
	uint8_t lengths[LITERALS];

	if (inflater->has_fixed)
		return code;
	for (int i = 0; i < LITERALS; i++)
		lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
	code->literal_bits = build(code->literals, LITERAL_ROOM, LITERAL_BITS, lengths,
				   LITERALS, inflater->literal_meanings);
	memset(lengths, 5, DISTANCES);
	code->distance_bits = build(code->distances, DISTANCE_ROOM, DISTANCE_BITS, lengths,
				    DISTANCES, inflater->distance_meanings);
	inflater->has_fixed = 1;
	return code;
}

/* Read the code of a block. Returns NULL if it is invalid. */
static const struct code *dynamic_code(struct inflater *inflater, struct bits *bits)
{
	static const uint8_t order[LENGTH_CODES] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
						    11, 4,  12, 3, 13, 2, 14, 1, 15};
	struct code *code = &inflater->dynamic;
	uint8_t lengths[LITERALS + DISTANCES], code_lengths[LENGTH_CODES] = {0};
	uint32_t table[1 << LENGTH_BITS];
	int literals, distances, count, wide, sum = 0, at = 0;

	refill(bits);
	literals = (int)take(bits, 5) + 257;
	distances = (int)take(bits, 5) + 1;
	count = (int)take(bits, 4) + 4;
	if (literals > 286 || distances > 30)
		return NULL;
	for (int i = 0; i < count; i++) {
		if (bits->have < 3)
			refill(bits);
		code_lengths[order[i]] = (uint8_t)take(bits, 3);
	}
	/* Unlike the other two, this code has to be complete. */
	for (int i = 0; i < LENGTH_CODES; i++)
		if (code_lengths[i])
			sum += 1 << LENGTH_BITS >> code_lengths[i];
	if (sum != 1 << LENGTH_BITS)
		return NULL;
	wide = build(table, 1 << LENGTH_BITS, LENGTH_BITS, code_lengths, LENGTH_CODES,
		     inflater->length_meanings);
	if (!wide)
		return NULL;
	while (at < literals + distances) {
		uint32_t symbol, entry;
		uint8_t length = 0;
		int repeat;

		if (bits->have < LENGTH_BITS + 7)
			refill(bits);
		entry = table[bits->value & ((1u << wide) - 1)];
		take(bits, entry & 0xff);
		symbol = entry >> 16;
		if (symbol < 16) {
			lengths[at++] = (uint8_t)symbol;
			continue;
		}
		if (symbol == 16) {
			if (!at)
				return NULL;
			length = lengths[at - 1];
			repeat = 3 + (int)take(bits, 2);
		} else if (symbol == 17) {
			repeat = 3 + (int)take(bits, 3);
		} else {
			repeat = 11 + (int)take(bits, 7);
		}
		if (repeat > literals + distances - at)
			return NULL;
		memset(lengths + at, length, (size_t)repeat);
		at += repeat;
	}
	if (!lengths[256])
		return NULL;
	code->literal_bits = build(code->literals, LITERAL_ROOM, LITERAL_BITS, lengths,
				   literals, inflater->literal_meanings);
	code->distance_bits = build(code->distances, DISTANCE_ROOM, DISTANCE_BITS,
				    lengths + literals, distances,
				    inflater->distance_meanings);
	return code->literal_bits && code->distance_bits ? code : NULL;
}

/* Look a code up, and take it. */
static inline uint32_t decode(struct bits *bits, const uint32_t *table, int wide)
{
	uint32_t entry = table[bits->value & ((1u << wide) - 1)];

	if ((entry & (SPECIAL | TABLE)) == (SPECIAL | TABLE))
		entry = table[(entry >> 16) +
			      (bits->value >> wide & ((1u << (entry >> 8 & 0xf)) - 1))];
	bits->value >>= entry & 0xff;
	bits->have -= (int)(entry & 0xff);
	return entry;
}

/* Expand a compressed block. Returns its end in the page, or NULL. */
static uint8_t *expand(struct bits *from, const struct code *code, uint8_t *out,
		       uint8_t *to, uint8_t *out_end)
{
	struct bits bits = *from;

	for (;;) {
		uint64_t length, distance;
		uint32_t entry;

		/* A length and a distance take 15 + 5 and 15 + 13. */
		if (bits.have < 48)
			refill(&bits);
		entry = decode(&bits, code->literals, code->literal_bits);
		if (entry & LITERAL) {
			if (to == out_end)
				return NULL;
			*to++ = (uint8_t)(entry >> 16);
			continue;
		}
		if (entry & SPECIAL) {
			*from = bits;
			return entry & END ? to : NULL;
		}
		length = (entry >> 16) + take(&bits, entry >> 8 & 0xf);
		entry = decode(&bits, code->distances, code->distance_bits);
		if (entry & SPECIAL)
			return NULL;
		distance = (entry >> 16) + take(&bits, entry >> 8 & 0xf);
		if (distance > (uint64_t)(to - out) || length > (uint64_t)(out_end - to))
			return NULL;
		copy_match(to, distance, length, out_end);
		to += length;
	}
}

/* Go back to the first byte of which no bit was taken. Returns 0 if it is beyond the end. */
static int to_byte(struct bits *bits)
{
	int real = bits->have - bits->fake;

	if (real < 0)
		return 0;
	bits->next -= real >> 3;
	bits->value = 0;
	bits->have = bits->fake = 0;
	return 1;
}

/* Copy a stored block. Returns its end in the page, or NULL. */
static uint8_t *stored(struct bits *bits, uint8_t *to, uint8_t *out_end)
{
	const uint8_t *at;
	unsigned int length;

	if (!to_byte(bits) || bits->end - bits->next < 4)
		return NULL;
	at = bits->next;
	length = at[0] | (unsigned int)at[1] << 8;
	if ((length ^ 0xffff) != (at[2] | (unsigned int)at[3] << 8))
		return NULL;
	at += 4;
	if (length > bits->end - at || length > out_end - to)
		return NULL;
	memcpy(to, at, length);
	bits->next = at + length;
	return to + length;
}

/* Words of eight bytes whose sums fit into lanes of 16 bits: 255 * 22 * 23 / 2 < 65536. */
#define WORDS 22
#define LANES 0x00ff00ff00ff00ffull

/* Sum up the four lanes. */
static inline uint32_t lanes(uint64_t value)
{
	value = (value & 0x0000ffff0000ffffull) + (value >> 16 & 0x0000ffff0000ffffull);
	return (uint32_t)value + (uint32_t)(value >> 32);
}

static uint32_t adler32(const uint8_t *data, uint64_t size)
{
	/* Each is reduced before it can overflow. */
	uint64_t low = 1, high = 0;

	while (size >= 8) {
		uint64_t words = size / 8 < WORDS ? size / 8 : WORDS;
		/* Bytes at even and odd offsets: sums, and sums of the sums so far. */
		uint64_t even = 0, odd = 0, evens = 0, odds = 0;

		high += low * words * 8;
		for (uint64_t i = 0; i < words; i++, data += 8) {
			uint64_t word = load64(data);

			evens += even;
			odds += odd;
			even += word & LANES;
			odd += word >> 8 & LANES;
		}
		size -= words * 8;
		/* A byte at offset i of its word counts 8 - i times there. */
		for (int i = 0; i < 4; i++)
			high += (even >> 16 * i & 0xffff) * (uint64_t)(8 - 2 * i) +
				(odd >> 16 * i & 0xffff) * (uint64_t)(7 - 2 * i);
		high = (high + 8 * ((uint64_t)lanes(evens) + lanes(odds))) % 65521;
		low = (low + lanes(even) + lanes(odd)) % 65521;
	}
	for (; size; size--) {
		low += *data++;
		high += low;
	}
	return (uint32_t)(high % 65521 << 16 | low % 65521);
}

static int unpack_zlib(struct inflater *inflater, const uint8_t *in, const uint8_t *in_end,
		       uint8_t *out, uint8_t *out_end)
{
	struct bits bits = {in + 2, in_end, 0, 0, 0};
	uint8_t *to = out;
	unsigned int last;

	/* Deflate with a window of at most 32 KiB, and no preset dictionary. */
	if (in_end - in < 2 || (in[0] & 0xf) != 8 || in[0] >> 4 > 7 || in[1] & 0x20 ||
	    (in[0] << 8 | in[1]) % 31)
		return 0;
	do {
		const struct code *code;

		refill(&bits);
		last = take(&bits, 1);
		switch (take(&bits, 2)) {
		case 0:
			to = stored(&bits, to, out_end);
			break;
		case 1:
			to = expand(&bits, fixed_code(inflater), out, to, out_end);
			break;
		case 2:
			code = dynamic_code(inflater, &bits);
			to = code ? expand(&bits, code, out, to, out_end) : NULL;
			break;
		default:
			return 0;
		}
		/* Blocks without content are bounded by what is left of the input. */
		if (!to || bits.have < bits.fake)
			return 0;
	} while (!last);
	if (to != out_end || !to_byte(&bits) || bits.end - bits.next < 4)
		return 0;
	in = bits.next;
	return adler32(out, (uint64_t)(out_end - out)) ==
	       ((uint32_t)in[0] << 24 | (uint32_t)in[1] << 16 | (uint32_t)in[2] << 8 | in[3]);
}

/* How the pages of a dump are compressed; set by kdump_pages.py. */
struct method {
	int64_t kind; /* 1 zlib, 2 LZO1X, 4 snappy, 0x20 zstd: the flag in descriptors */
	int64_t page_size;
	/* libzstd's ZSTD_decompressDCtx(), and its context. */
	size_t (*zstd)(void *context, void *to, size_t room, const void *from, size_t size);
	void *context;
	/* First bytes that each block of zstd has. */
	const uint8_t *start;
	int64_t start_size;
};

/* To be changed with the arguments of any function here, and in kdump_pages.py. */
int64_t msa_kdump_version(void)
{
	return 1;
}

/*
 * Expand pages.
 *
 * data has size bytes of the file from offset start on. Block i is at offsets[i] of the file
 * and has sizes[i] bytes; flags[i] is 0 if it is stored as it is. It goes to row rows[i] of
 * out, which has zeros, and for which the caller makes sure that there is room; here[rows[i]]
 * becomes 1 if it was a page, otherwise 0, and the row stays zeros.
 */
void msa_kdump_unpack(const struct method *method, const uint8_t *data, int64_t start,
		      int64_t size, const int64_t *offsets, const int64_t *sizes,
		      const int64_t *flags, const int64_t *rows, int64_t count,
		      uint8_t *out, uint8_t *here)
{
	struct inflater inflater;
	int64_t page_size = method->page_size;

	if (method->kind == 1)
		set_meanings(&inflater);
	for (int64_t i = 0; i < count; i++) {
		const uint8_t *in, *in_end;
		uint8_t *to = out + rows[i] * page_size, *end = to + page_size;
		int is_page = 0;

		here[rows[i]] = 0;
		/* Less was read if the disk failed. */
		if (offsets[i] < start || sizes[i] < 0 || sizes[i] > size ||
		    offsets[i] - start > size - sizes[i])
			continue;
		in = data + (offsets[i] - start);
		in_end = in + sizes[i];
		if (!flags[i]) {
			if (sizes[i] != page_size)
				continue;
			memcpy(to, in, (size_t)page_size);
			is_page = 1;
		} else if (flags[i] != method->kind) {
			continue;
		} else if (method->kind == 1) {
			is_page = unpack_zlib(&inflater, in, in_end, to, end);
		} else if (method->kind == 2) {
			is_page = unpack_lzo(in, in_end, to, end);
		} else if (method->kind == 4) {
			is_page = unpack_snappy(in, in_end, to, end);
		} else if (method->zstd && sizes[i] >= method->start_size &&
			   !memcmp(in, method->start, (size_t)method->start_size)) {
			is_page = method->zstd(method->context, to, (size_t)page_size, in,
					       (size_t)sizes[i]) == (size_t)page_size;
		}
		here[rows[i]] = (uint8_t)is_page;
		if (!is_page)
			memset(to, 0, (size_t)page_size);
	}
}
