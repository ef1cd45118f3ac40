//go:build linux

package main

import (
	"encoding/binary"
)

// kind is what a connection is for.
type kind uint8

const (
	echo      kind = iota // small requests and answers
	bulk                  // many bytes one way, with Write
	readFrom              // the same with ReadFrom
	buffers               // from a Buffer into a Buffer
	messages              // with boundaries
	halfClose             // an answer after the end of the request
	closed                // Write, and Close at once
	idle                  // nothing for a while
	httpKind              // HTTP/1.1 requests
	muxed                 // yamux streams
	datagrams
	silent // a TCP connection that says nothing
	numKinds
)

var kindNames = [numKinds]string{"echo", "bulk", "ReadFrom", "Buffers", "messages", "half-close", "close", "idle", "HTTP", "yamux", "datagrams", "silent"}

// header begins a connection.
type header struct {
	Kind kind
	Seed uint64
	N    uint32 // bytes, or rounds
}

const headerLen = 13

func (h *header) encode() []byte {
	b := append(make([]byte, 0, headerLen), byte(h.Kind))
	b = binary.BigEndian.AppendUint64(b, h.Seed)
	return binary.BigEndian.AppendUint32(b, h.N)
}
