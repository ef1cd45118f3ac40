package tsharktest_test

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/pcaptest"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

// wire is what is in a capture as our own decoder has it: against it shows what
// tshark has not found.
type wire struct {
	requests, replies map[int]int
	fpdus             map[iwarpwire.Opcode]int

	// Of connections between rdmanet ends.
	negotiations, messages int
	extended               int // messages among them with flags of ours, which tshark takes for something else
}

// readWire decodes the connections in a capture, each to its last byte.
func readWire(t *testing.T, path string) *wire {
	t.Helper()
	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	frames, err := pcaptest.Read(file)
	require.NoError(t, err)
	conns, err := pcaptest.Conns(frames)
	require.NoError(t, err)
	w := &wire{requests: map[int]int{}, replies: map[int]int{}, fpdus: map[iwarpwire.Opcode]int{}}
	for _, c := range conns {
		request, client := w.start(t, c.FromClient, false)
		reply, server := w.start(t, c.FromServer, true)
		require.Equal(t, request.CRC, reply.CRC, "CRC is asked for by the initiator here")
		ours := isRdmanet(request.Private) && isRdmanet(reply.Private)
		early := ours && isEarly(request.Private) && isEarly(reply.Private)
		w.stream(t, client, request.CRC, ours, early)
		w.stream(t, server, request.CRC, ours, early)
	}
	return w
}

// Of the private data of docs/protocol.md: the magic, and the feature bit of
// early negotiation.
func isRdmanet(private []byte) bool { return len(private) >= 20 && string(private[8:12]) == "RDNT" }
func isEarly(private []byte) bool   { return private[15]&(1<<4) != 0 }

// start decodes the MPA frame at the start of a stream and returns the rest.
func (w *wire) start(t *testing.T, stream []byte, reply bool) (iwarpwire.Start, []byte) {
	t.Helper()
	n, err := iwarpwire.ParseStartHeader(stream, reply)
	require.NoError(t, err)
	n += iwarpwire.StartLen
	s, err := iwarpwire.ParseStart(stream[:n], reply)
	require.NoError(t, err)
	if reply {
		w.replies[int(s.Rev)]++
	} else {
		w.requests[int(s.Rev)]++
	}
	return s, stream[n:]
}

// stream counts the FPDUs of one direction and, if that is between rdmanet
// ends, the messages in them.
func (w *wire) stream(t *testing.T, stream []byte, crc, ours, early bool) {
	t.Helper()
	negotiated := early
	var message []byte
	for len(stream) > 0 {
		n := int(binary.BigEndian.Uint16(stream))
		total := iwarpwire.FPDULen(n)
		require.GreaterOrEqual(t, len(stream), total, "the stream ends in an FPDU")
		if body := total - iwarpwire.CRCLen; crc {
			require.Equal(t, iwarpwire.CRC(0, stream[:body]), iwarpwire.GetCRC(stream[body:]))
		}
		ulpdu := stream[iwarpwire.LengthLen:][:n]
		stream = stream[total:]
		var h iwarpwire.Header
		at, refused := h.Parse(ulpdu)
		require.Nil(t, refused)
		w.fpdus[h.Op]++
		if !ours || h.Tagged || h.QN != iwarpwire.QNSend {
			continue
		}
		message = append(message, ulpdu[at:]...)
		if !h.Last {
			continue
		}
		switch flags := binary.LittleEndian.Uint16(message[4:]); {
		case !negotiated:
			w.negotiations++
			negotiated = true
		case flags&^1 != 0:
			w.messages++
			w.extended++
		default:
			w.messages++
		}
		message = message[:0]
	}
}

// agree dissects a capture and fails the test unless tshark finds all that is
// there, and no fault with it.
func agree(t *testing.T, path string) (*tsharktest.Tally, *wire) {
	t.Helper()
	tally, w := tsharktest.Dissect(t, path), readWire(t, path)
	t.Log(tally)
	require.Empty(t, tally.Faults)
	require.Equal(t, w.requests, tally.Requests)
	require.Equal(t, w.replies, tally.Replies)
	require.Equal(t, w.fpdus, tally.FPDUs)
	require.Zero(t, tally.BadCRC)
	return tally, w
}

func sum(counts map[iwarpwire.Opcode]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}
