package rdmanet

import (
	"encoding/binary"
	"math"
)

// Large transfers between two rdmanet peers, after the session protocol of
// Winsock Direct: what is large stays where it is, a message tells of it, and
// the device moves it by RDMA. docs/protocol.md, section 6, has the formats.
//
// By RDMA Read, the rule:
//
//	sender                               receiver
//	  offer: key, address, length  ->      (the beginning of the data may come along)
//	                                       RDMA Reads, into the reader's memory or scratch
//	                               <-      done
//	  closes the key
//
// By RDMA Write, where one of the two cannot or will not read:
//
//	  request: length              ->
//	                               <-      grant: key, address, length (once or oftener)
//	  RDMA Write, written          ->      closes the key
//
// An offer, and a request, has its place in the stream like a segment. What it
// stands for is fetched when the program reads, so the sender's memory is what
// holds unread data; see transfer_recv.go for the exception. transfer_send.go is the
// sender's side.
//
// A sender that cannot wait withdraws its transfer: the receiver answers with
// how much it has taken, the stream goes on behind that.

// transferKind is what a transferHeader says.
type transferKind uint8

const (
	transferOffer    transferKind = 1 // Length bytes may be read at Addr with Key
	transferRequest  transferKind = 2 // Length bytes wait to be written
	transferGrant    transferKind = 3 // Length bytes may be written at Addr with Key
	transferWritten  transferKind = 4 // Length bytes were, to the oldest grant
	transferDone     transferKind = 5 // transfer ID is over after Length bytes, those before it whole
	transferWithdraw transferKind = 6 // transfer ID is to end where it is
)

// Bits of Flags. A receiver ignores those it does not know.
const (
	// transferEnd is set with transferWritten when the transfer was withdrawn:
	// nothing comes behind these bytes.
	transferEnd = 1 << 0

	// transferCut is set when a transfer of WriteMsg's is withdrawn: its message,
	// of which anything has come, is not whole and has no end.
	transferCut = 1 << 1
)

// transferHeader follows the header of a Data Transfer message at dataOffset
// where flagTransfer is set. All fields are little-endian.
type transferHeader struct {
	Kind   transferKind
	Flags  uint8
	ID     uint32 // of the sender's transfers, counted from 1
	Addr   uint64
	Key    uint32
	Length uint32
	Rest   uint64 // offer, request: bytes of the message that come behind the transfer
}

const (
	transferHeaderLen = 32
	transferOffset    = dataOffset + transferHeaderLen // where the payload of an offer starts

	// maxTransfers is how many transfers a side may have under way, and how many
	// grants of one may be open.
	maxTransfers = 16

	// transferCeiling is the longest single transfer, bytes.
	transferCeiling = 1 << 30
)

var (
	errTransferHeader = &protocolError{"transfer header", "shorter than its length"}
	errTransferKind   = &protocolError{"transfer header", "kind out of place"}
	errTransferID     = &protocolError{"transfer header", "ID out of sequence"}
	errTransferLength = &protocolError{"transfer header", "length out of range"}
	errTransferCount  = &protocolError{"transfer header", "too many at a time"}
	errTransferRest   = &protocolError{"transfer header", "not what is left of the message"}
)

// put writes the header to the front of b and returns its length.
func (t *transferHeader) put(b []byte) int {
	_ = b[transferHeaderLen-1]
	le := binary.LittleEndian
	b[0], b[1], b[2], b[3] = byte(t.Kind), t.Flags, 0, 0
	le.PutUint32(b[4:], t.ID)
	le.PutUint64(b[8:], t.Addr)
	le.PutUint32(b[16:], t.Key)
	le.PutUint32(b[20:], t.Length)
	le.PutUint64(b[24:], t.Rest)
	return transferHeaderLen
}

// parse reads the transfer header of b, a received message whose header is h. What
// it checks is what can be said of one message alone.
func (t *transferHeader) parse(h *segmentHeader, b []byte) error {
	if len(b) < transferOffset || h.DataLength > 0 && h.DataOffset < transferOffset {
		return errTransferHeader
	}
	b = b[dataOffset:transferOffset]
	le := binary.LittleEndian
	*t = transferHeader{
		Kind:   transferKind(b[0]),
		Flags:  b[1],
		ID:     le.Uint32(b[4:]),
		Addr:   le.Uint64(b[8:]),
		Key:    le.Uint32(b[16:]),
		Length: le.Uint32(b[20:]),
		Rest:   le.Uint64(b[24:]),
	}
	if t.Length > transferCeiling {
		return errTransferLength
	}
	switch t.Kind {
	case transferOffer, transferRequest:
		if t.Rest > math.MaxInt64-2*transferCeiling || h.Remaining != 0 ||
			t.Length == 0 && h.DataLength == 0 {
			return errTransferLength
		}
		return nil
	case transferGrant, transferWritten, transferDone, transferWithdraw:
		if h.DataLength != 0 || h.Remaining != 0 {
			return errTransferKind
		}
		return nil
	}
	return errTransferKind
}

// opens reports whether the header belongs to the stream: a transfer begins.
func (t *transferHeader) opens() bool {
	return t.Kind == transferOffer || t.Kind == transferRequest
}

// transferMode is how the two ends have agreed to move what one of them sends.
type transferMode uint8

const (
	transferNone  transferMode = iota // not at all: segments
	transferRead                      // the receiver reads
	transferWrite                     // the sender writes
)

// transferModes is what follows from the private data of both ends for what goes
// out and what comes in. Reads need an end that issues them and one that serves
// them; an end that wants none says so by a feature bit.
func transferModes(ours, peers privateData) (out, in transferMode) {
	if ours.features&peers.features&featureTransfer == 0 {
		return transferNone, transferNone
	}
	mode := func(sender, receiver privateData) transferMode {
		if (sender.features|receiver.features)&featureNoRead != 0 || sender.ird == 0 || receiver.ord == 0 {
			return transferWrite
		}
		return transferRead
	}
	return mode(ours, peers), mode(peers, ours)
}

// putWith is put with a transfer header behind it if t is not nil.
func (h *segmentHeader) putWith(t *transferHeader, b []byte) int {
	if t == nil {
		return h.put(b)
	}
	h.Flags |= flagTransfer
	if h.DataLength > 0 {
		h.DataOffset = transferOffset
	}
	h.put(b)
	clear(b[dataHeaderLen:dataOffset])
	return dataOffset + t.put(b[dataOffset:])
}
