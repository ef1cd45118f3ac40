package rdmanet

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTransferHeaderPut(t *testing.T) {
	h := transferHeader{Kind: 3, Flags: 0x81, ID: 0x01020304, Addr: 0x05060708090a0b0c, Key: 0x0d0e0f10, Length: 0x11121314,
		Rest: 0x15161718191a1b1c}
	want := []byte{
		3, 0x81, 0, 0, 4, 3, 2, 1,
		0xc, 0xb, 0xa, 9, 8, 7, 6, 5,
		0x10, 0xf, 0xe, 0xd, 0x14, 0x13, 0x12, 0x11,
		0x1c, 0x1b, 0x1a, 0x19, 0x18, 0x17, 0x16, 0x15,
	}
	b := bytes.Repeat([]byte{0xee}, 40)
	require.Equal(t, transferHeaderLen, h.put(b))
	require.Equal(t, want, b[:transferHeaderLen])
	require.Equal(t, bytes.Repeat([]byte{0xee}, 8), b[transferHeaderLen:])
}

// A transfer header lies at the same place with payload behind it and without;
// what no header has is zero.
func TestSegmentPutWith(t *testing.T) {
	th := transferHeader{Kind: transferOffer, ID: 1, Length: 2}
	var wire [transferHeaderLen]byte
	th.put(wire[:])
	for _, n := range []int{0, 1, 1000} {
		h := segmentHeader{CreditsRequested: 5, CreditsGranted: 6, Flags: flagResponseRequested, DataLength: uint32(n)}
		if n > 0 {
			h.DataOffset = dataOffset
		}
		b := bytes.Repeat([]byte{0xee}, 80)
		require.Equal(t, transferOffset, h.putWith(&th, b))
		require.Equal(t, make([]byte, dataOffset-dataHeaderLen), b[dataHeaderLen:dataOffset])
		require.Equal(t, wire[:], b[dataOffset:transferOffset])
		require.Equal(t, bytes.Repeat([]byte{0xee}, 80-transferOffset), b[transferOffset:])

		b = append(b[:transferOffset], make([]byte, n)...)
		var got segmentHeader
		payload, err := got.parse(b)
		require.NoError(t, err)
		require.Len(t, payload, n)
		want := segmentHeader{CreditsRequested: 5, CreditsGranted: 6, Flags: flagResponseRequested | flagTransfer, DataLength: uint32(n)}
		if n > 0 {
			want.DataOffset = transferOffset
		}
		require.Equal(t, want, got)
		var again transferHeader
		require.NoError(t, again.parse(&got, b))
		require.Equal(t, th, again)
	}
	h := segmentHeader{CreditsRequested: 5, DataOffset: dataOffset, DataLength: 1}
	b, plain := make([]byte, 80), make([]byte, 80)
	require.Equal(t, h.put(plain), h.putWith(nil, b))
	require.Equal(t, plain, b)
}

func TestTransferHeaderParse(t *testing.T) {
	const most = math.MaxInt64 - 2*transferCeiling
	payload := segmentHeader{DataOffset: transferOffset, DataLength: 10}
	offer := func(change func(t *transferHeader)) transferHeader {
		t := transferHeader{Kind: transferOffer, ID: 1, Addr: 2, Key: 3, Length: 4}
		change(&t)
		return t
	}
	of := func(kind transferKind) transferHeader { return transferHeader{Kind: kind, ID: 1, Length: 1} }
	for _, tt := range []struct {
		name string
		h    segmentHeader
		t    transferHeader
		size int // of the message, 100 if 0
		want error
	}{
		{name: "offer", t: offer(func(t *transferHeader) {})},
		{name: "offer with payload", h: payload, t: offer(func(t *transferHeader) {})},
		{name: "payload further behind", h: segmentHeader{DataOffset: transferOffset + 8, DataLength: 10}, t: offer(func(t *transferHeader) {})},
		{name: "header and nothing else", size: transferOffset, t: offer(func(t *transferHeader) {})},
		{name: "the longest", t: offer(func(t *transferHeader) { t.Length = transferCeiling })},
		{name: "the largest values", t: offer(func(t *transferHeader) {
			t.ID, t.Addr, t.Key, t.Flags, t.Rest = math.MaxUint32, math.MaxUint64, math.MaxUint32, 0xff, most
		})},
		{name: "payload only", h: payload, t: offer(func(t *transferHeader) { t.Length = 0 })},
		{name: "request", t: of(transferRequest)},
		{name: "grant", t: of(transferGrant)},
		{name: "written", t: of(transferWritten)},
		{name: "done", t: of(transferDone)},
		{name: "withdraw", t: of(transferWithdraw)},
		{name: "offset without payload", h: segmentHeader{DataOffset: dataOffset}, t: of(transferDone)},

		{name: "one byte short", size: transferOffset - 1, t: of(transferDone), want: errTransferHeader},
		{name: "no transfer header", size: dataHeaderLen, t: of(transferDone), want: errTransferHeader},
		{name: "payload at the place of the header", h: segmentHeader{DataOffset: dataOffset, DataLength: 10}, t: of(transferOffer), want: errTransferHeader},
		{name: "payload overlaps the header's end", h: segmentHeader{DataOffset: transferOffset - 8, DataLength: 10}, t: of(transferOffer), want: errTransferHeader},
		{name: "kind 0", t: of(0), want: errTransferKind},
		{name: "kind 7", t: of(7), want: errTransferKind},
		{name: "kind 255", t: of(255), want: errTransferKind},
		{name: "nothing offered", t: offer(func(t *transferHeader) { t.Length = 0 }), want: errTransferLength},
		{name: "one byte too long", t: offer(func(t *transferHeader) { t.Length = transferCeiling + 1 }), want: errTransferLength},
		{name: "length 2^32-1", t: offer(func(t *transferHeader) { t.Length = math.MaxUint32 }), want: errTransferLength},
		{name: "rest one too large", t: offer(func(t *transferHeader) { t.Rest = most + 1 }), want: errTransferLength},
		{name: "rest 2^64-1", t: offer(func(t *transferHeader) { t.Rest = math.MaxUint64 }), want: errTransferLength},
		{name: "request too long", t: transferHeader{Kind: transferRequest, Length: transferCeiling + 1}, want: errTransferLength},
		{name: "offer with a remainder", h: segmentHeader{Remaining: 1}, t: offer(func(t *transferHeader) {}), want: errTransferLength},
		{name: "grant with payload", h: payload, t: of(transferGrant), want: errTransferKind},
		{name: "written with payload", h: payload, t: of(transferWritten), want: errTransferKind},
		{name: "done with payload", h: payload, t: of(transferDone), want: errTransferKind},
		{name: "withdraw with payload", h: payload, t: of(transferWithdraw), want: errTransferKind},
		{name: "done with a remainder", h: segmentHeader{Remaining: 1}, t: of(transferDone), want: errTransferKind},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := make([]byte, 100)
			tt.t.put(b[dataOffset:])
			if tt.size > 0 {
				b = b[:tt.size]
			}
			var got transferHeader
			require.Equal(t, tt.want, got.parse(&tt.h, b))
			if tt.want == nil {
				require.Equal(t, tt.t, got)
			}
		})
	}
}

func TestTransferOpens(t *testing.T) {
	for k := range transferKind(10) {
		h := transferHeader{Kind: k}
		require.Equal(t, k == transferOffer || k == transferRequest, h.opens(), "%d", k)
	}
}

// The bytes of a message that comes by transfers add up, whatever carries them.
func TestAcceptTransfer(t *testing.T) {
	type step struct {
		data, length uint32
		rest         uint64
		segment      bool // no transfer: rest is the remainder
		flags        uint16
		first, last  bool
		err          error
	}
	const most = math.MaxInt64 - 2*transferCeiling
	for _, tt := range []struct {
		name     string
		fin      bool
		messages bool
		steps    []step
	}{
		{name: "one transfer", steps: []step{{length: 10, first: true, last: true}, {length: 10, first: true, last: true}}},
		{name: "with a beginning", steps: []step{{data: 5, length: 10, first: true, last: true}}},
		{name: "several", steps: []step{
			{data: 5, length: 10, rest: 100, first: true},
			{length: 60, rest: 40},
			{data: 30, rest: 10},
			{data: 1, length: 9, last: true},
			{segment: true, data: 3, first: true, last: true},
		}},
		{name: "no limit on a message", steps: []step{
			{data: 5, length: transferCeiling, rest: most, first: true},
			{length: transferCeiling, rest: most - transferCeiling},
		}},
		{name: "between segments", steps: []step{
			{segment: true, data: 3, first: true, last: true},
			{length: 10, first: true, last: true},
			{segment: true, data: 3, rest: 2, first: true},
			{segment: true, data: 2, last: true},
			{length: 10, first: true, last: true},
		}},
		{name: "messages without payload come in between", steps: []step{
			{length: 10, rest: 5, first: true},
			{segment: true},
			{length: 5, last: true},
		}},
		{name: "in a message of segments", steps: []step{
			{segment: true, data: 3, rest: 10, first: true},
			{length: 10, err: errTransferRest},
			{segment: true, data: 10, last: true},
		}},
		{name: "a segment in a message of transfers", steps: []step{
			{length: 10, rest: 10, first: true},
			{segment: true, data: 10, err: errTransferRest},
			{segment: true, rest: 10, err: errTransferRest},
			{length: 10, last: true},
		}},
		{name: "more than the rest", steps: []step{{length: 10, rest: 10, first: true}, {length: 11, err: errTransferRest}, {length: 10, last: true}}},
		{name: "less than the rest", steps: []step{{length: 10, rest: 10, first: true}, {length: 9, err: errTransferRest}}},
		{name: "the rest stands still", steps: []step{{length: 10, rest: 10, first: true}, {length: 10, rest: 10, err: errTransferRest}}},
		{name: "the rest grows", steps: []step{{length: 10, rest: 10, first: true}, {length: 1, rest: most, err: errTransferRest}}},

		{name: "FIN behind", fin: true, steps: []step{
			{length: 10, first: true, last: true},
			{segment: true, flags: flagFIN},
			{length: 1, err: errDataAfterFIN},
			{data: 1, err: errDataAfterFIN},
		}},
		{name: "FIN inside", fin: true, steps: []step{
			{length: 10, rest: 10, first: true},
			{segment: true, flags: flagFIN, err: errFINInMessage},
			{length: 10, flags: flagFIN, err: errFINInMessage},
			{length: 10, last: true},
		}},
		{name: "FIN with it", fin: true, steps: []step{{length: 10, flags: flagFIN, err: errFINInMessage}}},
		{name: "an empty message", messages: true, steps: []step{
			{length: 10, flags: flagEmpty, err: errEmptyFlag},
			{length: 10, rest: 10, first: true},
			{length: 10, flags: flagEmpty, err: errEmptyFlag},
			{length: 10, last: true},
		}},
		{name: "an empty message not agreed is ignored", steps: []step{{length: 10, flags: flagEmpty, first: true, last: true}}},
		{name: "FIN not agreed is ignored", steps: []step{
			{length: 10, flags: flagFIN, first: true, last: true},
			{length: 10, rest: 1, flags: flagFIN, first: true},
			{segment: true, flags: flagFIN},
			{length: 1, last: true},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := reassembler{max: 1000, fin: tt.fin, messages: tt.messages}
			for i, s := range tt.steps {
				before := r
				h := segmentHeader{CreditsRequested: 1, Flags: s.flags, DataLength: s.data}
				var first, last bool
				var err error
				if s.segment {
					h.Remaining = uint32(s.rest)
					first, last, err = r.accept(&h)
				} else {
					first, last, err = r.acceptTransfer(&h, &transferHeader{Kind: transferOffer, Length: s.length, Rest: s.rest})
				}
				require.Equal(t, s.err, err, "step %d", i)
				require.Equal(t, []bool{s.first, s.last}, []bool{first, last}, "step %d", i)
				if err != nil {
					require.Equal(t, before, r, "step %d: an error changes nothing", i)
				}
			}
		})
	}
}

func TestTransferModes(t *testing.T) {
	both := privateData{rdmanet: true, features: featureTransfer, ird: 16, ord: 16}
	with := func(change func(p *privateData)) privateData {
		p := both
		change(&p)
		return p
	}
	none := with(func(p *privateData) { p.features = featureFIN })
	noRead := with(func(p *privateData) { p.features |= featureNoRead })
	serves := with(func(p *privateData) { p.ord = 0 })
	issues := with(func(p *privateData) { p.ird = 0 })
	plain := privateData{ird: 16, ord: 16}
	for _, tt := range []struct {
		name       string
		ours, peer privateData
		out, in    TransferMode
	}{
		{"both can", both, both, TransferRead, TransferRead},
		{"one is enough of a depth", with(func(p *privateData) { p.ird, p.ord = 1, 1 }), both, TransferRead, TransferRead},
		{"the peer does not know of it", both, none, TransferNone, TransferNone},
		{"we do not want it", none, both, TransferNone, TransferNone},
		{"a plain peer", both, plain, TransferNone, TransferNone},
		{"nobody", none, none, TransferNone, TransferNone},
		{"we want no Reads", noRead, both, TransferWrite, TransferWrite},
		{"the peer wants no Reads", both, noRead, TransferWrite, TransferWrite},
		{"no Reads of nobody", none, noRead, TransferNone, TransferNone},
		{"we serve only", serves, both, TransferRead, TransferWrite},
		{"the peer serves only", both, serves, TransferWrite, TransferRead},
		{"we issue only", issues, both, TransferWrite, TransferRead},
		{"the peer issues only", both, issues, TransferRead, TransferWrite},
		{"both serve only", serves, serves, TransferWrite, TransferWrite},
		{"both issue only", issues, issues, TransferWrite, TransferWrite},
		{"one serves, one issues", serves, issues, TransferRead, TransferWrite},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, in := transferModes(tt.ours, tt.peer)
			require.Equal(t, []TransferMode{tt.out, tt.in}, []TransferMode{out, in})
			// The peer has come to the same.
			out, in = transferModes(tt.peer, tt.ours)
			require.Equal(t, []TransferMode{tt.in, tt.out}, []TransferMode{out, in})
		})
	}
}

// FuzzTransferHeader parses anything. What is accepted is within bounds, can be
// added up, and encodes to the bytes that it came from.
func FuzzTransferHeader(f *testing.F) {
	for k := transferOffer; k <= transferWithdraw; k++ {
		h := segmentHeader{CreditsRequested: 1}
		b := make([]byte, transferOffset)
		h.putWith(&transferHeader{Kind: k, ID: 1, Addr: 1 << 40, Key: 7, Length: 4096}, b)
		f.Add(b)
		h.DataOffset, h.DataLength = dataOffset, 10
		h.putWith(&transferHeader{Kind: k, ID: 1, Length: 4096, Rest: 1 << 33}, b)
		f.Add(append(b, make([]byte, 10)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h segmentHeader
		var th transferHeader
		if _, err := h.parse(b); err != nil || th.parse(&h, b) != nil {
			return
		}
		if th.opens() {
			sum := uint64(h.DataLength) + uint64(th.Length) + th.Rest
			if sum == 0 || sum > math.MaxInt64 || th.Length > transferCeiling {
				t.Fatalf("%+v %+v", h, th)
			}
			r := reassembler{max: 1}
			first, last, err := r.acceptTransfer(&h, &th)
			if !first || last != (th.Rest == 0) || err != nil {
				t.Fatalf("%+v: %v, %v, %v", th, first, last, err)
			}
		} else if h.DataLength != 0 || h.Remaining != 0 {
			t.Fatalf("%+v with payload", th)
		}
		if h.DataLength > 0 && h.DataOffset < transferOffset {
			t.Fatalf("payload overlaps: %+v", h)
		}
		got := make([]byte, transferHeaderLen)
		th.put(got)
		want := bytes.Clone(b[dataOffset:transferOffset])
		want[2], want[3] = 0, 0 // reserved
		if !bytes.Equal(got, want) {
			t.Fatalf("encoded again:\n% x, want\n% x", got, want)
		}
	})
}
