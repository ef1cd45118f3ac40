package rdmanet

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"
)

func TestReassembler(t *testing.T) {
	const limit = 1000
	type step struct {
		length, remaining uint32
		flags             uint16
		first, last       bool
		err               error
	}
	fin, expedited, partial, void := flagFIN, flagExpedited, flagPartial, flagEmpty
	for _, tt := range []struct {
		name  string
		fin   bool // featureFIN agreed
		flags bool // featureMessages agreed
		steps []step
	}{
		{name: "one segment", steps: []step{
			{length: 1, first: true, last: true},
			{length: 1, first: true, last: true},
		}},
		{name: "several segments", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 20, remaining: 10},
			{length: 10, last: true},
			{length: 5, first: true, last: true},
		}},
		{name: "exactly the limit", steps: []step{
			{length: limit, first: true, last: true},
			{length: 1, remaining: limit - 1, first: true},
			{length: limit - 1, last: true},
		}},
		{name: "one byte over the limit", steps: []step{{length: limit + 1, err: errMessageSize}}},
		{name: "one byte over the limit, in segments", steps: []step{{length: 1, remaining: limit, err: errMessageSize}}},
		{name: "remainder alone over the limit", steps: []step{{remaining: limit + 1, err: errMessageSize}}},
		{name: "sum 2^31", steps: []step{{length: 1, remaining: 1<<31 - 1, err: errMessageSize}}},
		{name: "sum wraps to 0", steps: []step{{length: 1, remaining: math.MaxUint32, err: errMessageSize}}},
		{name: "sum wraps, large length", steps: []step{{length: math.MaxUint32, remaining: 1, err: errMessageSize}}},
		{name: "both 2^32-1", steps: []step{{length: math.MaxUint32, remaining: math.MaxUint32, err: errMessageSize}}},

		{name: "remainder falls by too little", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 20, remaining: 11, err: errRemaining},
		}},
		{name: "remainder falls by too much", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 20, remaining: 9, err: errRemaining},
		}},
		{name: "remainder stands still", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 20, remaining: 30, err: errRemaining},
		}},
		{name: "remainder grows", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 20, remaining: 500, err: errRemaining},
		}},
		{name: "last before its time", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 29, err: errRemaining},
		}},
		{name: "more than the rest", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 31, err: errDataBeyondRest},
		}},
		{name: "more than the rest, remainder wraps", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 31, remaining: limit - 31, err: errDataBeyondRest},
		}},
		{name: "a refused segment changes nothing", steps: []step{
			{length: 10, remaining: 30, first: true},
			{length: 31, err: errDataBeyondRest},
			{length: 30, last: true},
		}},

		{name: "empty between messages", steps: []step{
			{},
			{length: 10, first: true, last: true},
			{flags: flagResponseRequested},
		}},
		{name: "empty inside a message", steps: []step{
			{length: 10, remaining: 30, first: true},
			{},
			{flags: flagResponseRequested},
			{length: 30, last: true},
		}},
		{name: "empty that begins a message", steps: []step{
			{remaining: 30, first: true},
			{length: 10, remaining: 20},
			{length: 20, last: true},
		}},
		{name: "empty that repeats the remainder", steps: []step{
			{length: 10, remaining: 30, first: true},
			{remaining: 30},
			{length: 30, last: true},
		}},
		{name: "empty with another remainder", steps: []step{
			{length: 10, remaining: 30, first: true},
			{remaining: 29, err: errRemaining},
		}},

		{name: "FIN not agreed is ignored", steps: []step{
			{length: 10, remaining: 30, flags: fin, first: true},
			{length: 30, flags: fin, last: true},
			{flags: fin},
			{length: 1, first: true, last: true},
		}},
		{name: "FIN alone", fin: true, steps: []step{
			{length: 1, first: true, last: true},
			{flags: fin},
			{},
			{flags: flagResponseRequested},
			{flags: fin},
			{length: 1, err: errDataAfterFIN},
		}},
		{name: "FIN with the last segment", fin: true, steps: []step{
			{length: 1, remaining: 2, first: true},
			{length: 2, flags: fin | flagResponseRequested, last: true},
			{remaining: 1, err: errDataAfterFIN},
		}},
		{name: "FIN inside a message", fin: true, steps: []step{
			{length: 1, remaining: 2, flags: fin, err: errFINInMessage},
			{length: 1, remaining: 2, first: true},
			{flags: fin, err: errFINInMessage},
			{length: 1, remaining: 1, flags: fin, err: errFINInMessage},
			{length: 2, flags: fin, last: true},
		}},

		{name: "flags of messages not agreed are ignored", fin: true, steps: []step{
			{length: 10, remaining: 30, flags: expedited | partial, first: true},
			{length: 30, flags: void, last: true},
			{flags: void},
			{length: 1, flags: expedited, first: true, last: true},
			{flags: fin | partial},
		}},
		{name: "expedited and normal messages", fin: true, flags: true, steps: []step{
			{length: 10, remaining: 30, flags: expedited, first: true},
			{}, // credits belong to no message
			{length: 30, flags: expedited, last: true},
			{length: 1, first: true, last: true},
			{flags: expedited | partial},
			{length: 1, flags: fin, first: true, last: true},
		}},
		{name: "flags change inside a message", fin: true, flags: true, steps: []step{
			{length: 10, remaining: 30, flags: expedited, first: true},
			{length: 30, err: errMessageFlags},
			{length: 30, flags: expedited | partial, err: errMessageFlags},
			{length: 30, flags: expedited, last: true},
		}},
		{name: "pieces", fin: true, flags: true, steps: []step{
			{length: 10, remaining: 5, flags: partial, first: true},
			{length: 5, flags: partial, last: true},
			{flags: flagResponseRequested},
			{length: 1, flags: partial | flagNoResponse, first: true, last: true},
			{length: 1, first: true, last: true},
			{length: 1, flags: expedited | partial, first: true, last: true},
			{length: 1, flags: expedited, first: true, last: true},
			{flags: fin},
		}},
		{name: "a message inside one of the other kind", fin: true, flags: true, steps: []step{
			{length: 10, flags: partial, first: true, last: true},
			{length: 1, flags: expedited, err: errMessageInside},
			{flags: expedited | void, err: errMessageInside},
			{length: 1, first: true, last: true},
			{length: 1, flags: expedited | partial, first: true, last: true},
			{length: 1, err: errMessageInside},
			{length: 1, remaining: 1, flags: partial, err: errMessageInside},
		}},
		{name: "FIN before the last piece", fin: true, flags: true, steps: []step{
			{length: 10, flags: partial | fin, err: errFINInMessage},
			{length: 10, flags: partial, first: true, last: true},
			{flags: fin, err: errFINInMessage},
			{length: 10, flags: fin, first: true, last: true},
		}},
		{name: "empty messages", fin: true, flags: true, steps: []step{
			{flags: void, first: true, last: true},
			{flags: void | expedited, first: true, last: true},
			{length: 1, flags: partial, first: true, last: true},
			{flags: void, first: true, last: true},
			{flags: void | fin, first: true, last: true},
			{flags: void, err: errDataAfterFIN},
			{},
		}},
		{name: "empty messages with something in them, or inside another", fin: true, flags: true, steps: []step{
			{length: 1, flags: void, err: errEmptyFlag},
			{remaining: 1, flags: void, err: errEmptyFlag},
			{length: 1, remaining: 1, first: true},
			{flags: void, err: errRemaining},
			{length: 1, last: true},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := reassembler{max: limit, fin: tt.fin, messages: tt.flags}
			for i, s := range tt.steps {
				before := r
				first, last, err := r.accept(&segmentHeader{
					CreditsRequested: 1, Flags: s.flags, DataLength: s.length, Remaining: s.remaining,
				})
				if first != s.first || last != s.last || err != s.err {
					t.Fatalf("step %d: accept = %v, %v, %v; want %v, %v, %v", i, first, last, err, s.first, s.last, s.err)
				}
				if err != nil && r != before {
					t.Fatalf("step %d: %+v became %+v with an error", i, before, r)
				}
			}
		})
	}
}

// A reassembly model that counts from the front: the length of the message
// that is open and how much of it came, 0 and 0 between messages.
type reassemblyModel struct {
	max, total, got uint64
	fin, ended      bool

	messages bool
	under    uint16 // flags of the message under way
	waits    int    // for the next piece of a message: 1 a normal, 2 an expedited one
}

// accept says whether a segment is legal and, if so, whether a message begins
// and ends with it.
func (m *reassemblyModel) accept(length, remaining uint64, flags uint16) (first, last, ok bool) {
	fin, void := flags&flagFIN != 0, false
	if m.messages {
		void = flags&flagEmpty != 0
		flags &= flagExpedited | flagPartial
	} else {
		flags = 0
	}
	kind := 1
	if flags&flagExpedited != 0 {
		kind = 2
	}
	total, got := m.total, m.got
	switch {
	case length+remaining > m.max:
		return false, false, false
	case void && (length+remaining > 0 || total > 0):
		return false, false, false
	case length == 0 && remaining == 0 && !void:
		if fin && m.fin {
			if total > 0 || m.waits != 0 {
				return false, false, false
			}
			m.ended = true
		}
		return false, false, true // carries nothing
	case total > 0 && flags != m.under, total == 0 && m.waits != 0 && m.waits != kind:
		return false, false, false
	case void && !m.ended:
		if fin && m.fin && flags&flagPartial != 0 {
			return false, false, false
		}
		first, last = true, true
	case m.ended:
		return false, false, false
	case total == 0:
		total, got, first = length+remaining, length, true
	default:
		got += length
		if got+remaining != total {
			return false, false, false
		}
	}
	if total > 0 && got == total {
		last = true
		total, got = 0, 0
	}
	if fin && m.fin {
		if total > 0 || flags&flagPartial != 0 {
			return false, false, false
		}
		m.ended = true
	}
	m.total, m.got, m.under = total, got, flags
	m.waits = 0
	if flags&flagPartial != 0 {
		m.waits = kind
	}
	return first, last, true
}

// FuzzReassembly reads its input as a series of segments, five bytes each: what
// to do and two numbers. Each goes over the wire form into a reassembler, and
// verdict, message borders and bytes must be those of the model.
func FuzzReassembly(f *testing.F) {
	f.Fuzz(func(t *testing.T, ops []byte) {
		const limit, most = 512, 1 + 5*200 // small, so that inputs stay cheap
		if len(ops) == 0 {
			return
		}
		ops = ops[:min(len(ops), most)]
		agreed, messages := ops[0]&1 != 0, ops[0]&2 != 0
		ops = ops[1:]
		r := reassembler{max: limit, fin: agreed, messages: messages}
		m := reassemblyModel{max: limit, fin: agreed, messages: messages}
		var sent, received []byte
		next := byte(0)
		b := make([]byte, dataOffset+2*limit)

		for ; len(ops) >= 5; ops = ops[5:] {
			x := uint32(binary.LittleEndian.Uint16(ops[1:]))
			y := uint32(binary.LittleEndian.Uint16(ops[3:]))
			h := segmentHeader{CreditsRequested: 1}
			left := uint32(m.total - m.got)
			switch ops[0] & 7 {
			case 0, 1: // a message begins, or the current one goes on
				if left == 0 {
					left = 1 + y%limit
				}
				h.DataLength = 1 + x%left
				h.Remaining = left - h.DataLength
			case 2: // the rest of the message
				h.DataLength = left
			case 3: // nothing
			case 4: // nothing, but a remainder
				h.Remaining = left
			case 5: // one off
				h.DataLength = min(1+x%limit, left)
				h.Remaining = left - h.DataLength + y%3 - 1
			case 6: // anything small
				h.DataLength, h.Remaining = x%(2*limit), y%(2*limit)
			case 7: // large remainder
				h.DataLength, h.Remaining = x%limit, math.MaxUint32-y
			}
			if ops[0]&8 != 0 {
				h.Flags = flagFIN
			}
			for bit, flag := range []uint16{flagExpedited, flagPartial, flagEmpty, flagNoResponse} {
				if ops[0]&(16<<bit) != 0 {
					h.Flags |= flag
				}
			}
			if h.DataLength > 0 {
				h.DataOffset = dataOffset
			}
			n := h.put(b)
			payload := b[n : n+int(h.DataLength)]
			for i := range payload {
				payload[i] = next
				next++
			}

			var in segmentHeader
			got, err := in.parse(b[:n+len(payload)])
			if err != nil {
				t.Fatalf("parse %+v: %v", h, err)
			}
			first, last, err := r.accept(&in)
			wantFirst, wantLast, ok := m.accept(uint64(h.DataLength), uint64(h.Remaining), h.Flags)
			if ok != (err == nil) || first != wantFirst || last != wantLast {
				t.Fatalf("%+v: accept = %v, %v, %v; want %v, %v, accepted %v", h, first, last, err, wantFirst, wantLast, ok)
			}
			if r.remaining != uint32(m.total-m.got) || r.ended != m.ended {
				t.Fatalf("%+v: %+v does not match %+v", h, r, m)
			}
			if err != nil {
				continue
			}
			sent = append(sent, payload...)
			received = append(received, got...)
			if last && !bytes.Equal(sent, received) {
				t.Fatal("the message changed")
			}
			if last {
				sent, received = sent[:0], received[:0]
			}
		}
	})
}
