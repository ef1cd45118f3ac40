package rdmanet

import (
	"encoding/binary"
	"math"
)

// This file has the messages of large transfers between two rdmanet peers, which
// docs/protocol.md, section 6, describes. The data of a transfer stays with the sender: a
// message announces it, and the devices move it by RDMA. The design follows the session
// protocol of Winsock Direct.
//
// By RDMA Read:
//
//	sender                               receiver
//	  offer: key, address, length  ->      the beginning of the data may come as payload
//	                                       RDMA Reads, to the reader or to bounce buffers
//	                               <-      done: length
//	  closes the key
//
// By RDMA Write, if one of the two ends cannot or will not use RDMA Reads:
//
//	sender                               receiver
//	  request: length              ->
//	                               <-      memory grant: key, address, length (repeated)
//	  RDMA Write, written: length  ->      closes the key
//
// An offer or a request has its place in the stream, as a segment has. Its data is fetched
// when the program reads, so unread data lies in the sender's memory. transfer_recv.go
// describes the exception.
//
// A sender that cannot wait withdraws its transfer. The receiver answers with the length
// that it has taken, and the stream goes on behind these bytes.
//
// transfer_send.go has the state of the sending side, and transfer_recv.go that of the
// receiving side.

// transferKind is the meaning of a transferHeader.
type transferKind uint8

const (
	transferOffer   transferKind = 1 // The peer may read Length bytes at Addr with Key.
	transferRequest transferKind = 2 // The sender has Length bytes to write.
	transferGrant   transferKind = 3 // The peer may write Length bytes at Addr with Key.

	// The sender has written Length bytes to the oldest memory grant.
	transferWritten transferKind = 4

	// Transfer ID is over after Length bytes, and those before it as a whole.
	transferDone transferKind = 5

	transferWithdraw transferKind = 6 // The sender withdraws transfer ID.
)

// These are the bits of Flags. A receiver ignores unknown bits.
const (
	// transferEnd is set with transferWritten when the sender withdraws the transfer:
	// nothing follows the bytes that were written before.
	transferEnd = 1 << 0

	// transferCut is set when the sender withdraws a transfer that belongs to a message of
	// WriteMsg. If any of the message's bytes have arrived, it is incomplete and has no
	// end.
	transferCut = 1 << 1
)

// transferHeader follows the header of a Data Transfer message at dataOffset if
// flagTransfer is set. All fields are little-endian.
type transferHeader struct {
	Kind   transferKind
	Flags  uint8
	ID     uint32 // ID numbers the transfers of one direction, from 1.
	Addr   uint64
	Key    uint32
	Length uint32

	// Rest is how many bytes of the message follow the transfer of an offer or a request.
	Rest uint64
}

const (
	transferHeaderLen = 32

	// transferOffset is where the payload of a message with a transfer header begins.
	transferOffset = dataOffset + transferHeaderLen

	// maxTransfers bounds how many transfers of one direction are not over, and how many of
	// its memory grants are not answered.
	maxTransfers = 16

	// transferCeiling is the length in bytes of the longest transfer.
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

// parse reads the transfer header of b, a received message whose header is h. It checks
// only what one message alone can show.
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

// opens reports whether the message is an offer or a request, which has a place in the
// stream.
func (t *transferHeader) opens() bool {
	return t.Kind == transferOffer || t.Kind == transferRequest
}

// transferModes returns how outgoing and incoming data moves, which follows from the
// private data of both ends. RDMA Read needs a sender that serves Reads and a receiver that
// issues them. An end that wants no Reads sets featureNoRead.
func transferModes(ours, peers privateData) (out, in TransferMode) {
	if ours.features&peers.features&featureTransfer == 0 {
		return TransferNone, TransferNone
	}
	mode := func(sender, receiver privateData) TransferMode {
		if (sender.features|receiver.features)&featureNoRead != 0 || sender.ird == 0 || receiver.ord == 0 {
			return TransferWrite
		}
		return TransferRead
	}
	return mode(ours, peers), mode(peers, ours)
}

// putWith is put with the transfer header t behind it, if t is not nil.
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
