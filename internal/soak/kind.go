//go:build linux

package main

import (
	"encoding/binary"
)

// kind is the use of a connection.
type kind uint8

const (
	echo      kind = iota // echo has small requests and answers.
	bulk                  // bulk has many bytes in one direction, by Write.
	readFrom              // readFrom is bulk by ReadFrom.
	buffers               // buffers is a transfer from a Buffer into a Buffer.
	messages              // messages has messages with boundaries.
	halfClose             // halfClose has an answer after the end of the request.
	closed                // closed is a Write, and Close at once.
	idle                  // idle does nothing for a while.
	httpKind              // httpKind has HTTP/1.1 requests.
	muxed                 // muxed has yamux streams.
	datagrams
	silent // silent is a TCP connection that sends nothing.
	numKinds
)

var kindNames = [numKinds]string{"echo", "bulk", "ReadFrom", "Buffers", "messages", "half-close", "close", "idle", "HTTP", "yamux", "datagrams", "silent"}

// header is the first message of a connection.
type header struct {
	Kind kind
	Seed uint64
	N    uint32 // N is a number of bytes, or of rounds.

	// Mortal is set if the sender may be killed. Its stream may then end early without an
	// error, as over TCP.
	Mortal bool
}

const (
	headerLen = 13
	mortal    = 1 << 7 // mortal is set in the kind's byte for Mortal.
)

func (h *header) encode() []byte {
	k := byte(h.Kind)
	if h.Mortal {
		k |= mortal
	}
	b := append(make([]byte, 0, headerLen), k)
	b = binary.BigEndian.AppendUint64(b, h.Seed)
	return binary.BigEndian.AppendUint32(b, h.N)
}
