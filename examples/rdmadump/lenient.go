package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// lenient reads a capture and changes those headers on the way that pcapgo refuses and other
// tools take:
//
//   - a packet of pcap that says it was shorter on the wire than what was captured of it;
//   - pcap of versions before 2.4 and of 543.0, most of which have these two lengths the other
//     way round, and of versions behind 2.4;
//   - pcap with Kuznetzov's additions to the header of each packet;
//   - pcapng of version 1.2, which is that of 1.0;
//   - a block of pcapng whose length does not count its padding.
//
// It also keeps from pcapgo what the program does not use, as pcapgo would keep that in
// memory: names, statistics, and the options of packets. Whatever else is wrong is passed on,
// and pcapgo says what it is.
type lenient struct {
	b     *bufio.Reader
	order binary.ByteOrder
	next  func() error           // mends the next header in the buffer of b
	ready int                    // bytes of b that may be read as they are
	head  []byte                 // what is left to read of buf
	buf   [pcapPacketHeader]byte // a mended header, which is read before the bytes of b

	swapped     func(captured, length uint32) bool // reports whether the lengths of a packet of pcap are swapped
	extra       int                                // bytes that each header of a packet has more than pcapgo wants
	description int                                // cost of what describes the section of pcapng
}

const (
	pcapFileHeader   = 24
	pcapPacketHeader = 16

	magicMicro     = 0xa1b2c3d4
	magicNano      = 0xa1b23c4d
	magicKuznetzov = 0xa1b2cd34

	ngSection    = 0x0a0d0d0a
	ngInterface  = 1
	ngOldPacket  = 2 // has no options that pcapgo reads
	ngNames      = 4
	ngStatistics = 5
	ngPacket     = 6
	ngUnknown    = 1 << 31 // pcapgo leaves it out
	ngOrderMagic = 0x1a2b3c4d

	maxBlock       = 1 << 30 // A block that claims to be longer is damaged.
	maxDescription = 32 << 20
	blockCost      = 512 // is about what pcapgo keeps of a block beside the texts in it.
)

// newLenient returns a reader of the capture that b is at the beginning of.
func newLenient(b *bufio.Reader) *lenient {
	l := &lenient{b: b}
	l.next = l.begin
	return l
}

func (l *lenient) Read(p []byte) (int, error) {
	for len(l.head) == 0 && l.ready == 0 {
		if err := l.next(); err != nil {
			return 0, err
		}
	}
	if len(l.head) > 0 {
		n := copy(p, l.head)
		l.head = l.head[n:]
		return n, nil
	}
	n, err := l.b.Read(p[:min(len(p), l.ready)])
	l.ready -= n
	return n, err
}

// rest passes on all that is left as it is.
func (l *lenient) rest() error {
	if _, err := l.b.Peek(1); err != nil {
		return err
	}
	l.ready = l.b.Buffered()
	return nil
}

// peek returns the next n bytes, which may be changed.
func (l *lenient) peek(n int) ([]byte, error) {
	h, err := l.b.Peek(n)
	if len(h) == n {
		return h, nil
	}
	if err == io.EOF && len(h) > 0 {
		err = io.ErrUnexpectedEOF
	}
	l.next = func() error { return err } // Another Peek might not return it again.
	return nil, err
}

// begin finds out what kind of capture it is.
func (l *lenient) begin() error {
	h, err := l.peek(pcapFileHeader)
	if err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(h) == ngSection {
		l.next = l.block
		return nil
	}
	for _, l.order = range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch l.order.Uint32(h) {
		case magicKuznetzov:
			l.extra = 8
			l.order.PutUint32(h, magicMicro)
		case magicMicro, magicNano:
		default:
			continue
		}
		l.swapped = swapped(l.order.Uint16(h[4:]), l.order.Uint16(h[6:]))
		if l.swapped != nil {
			l.order.PutUint16(h[4:], 2)
			l.order.PutUint16(h[6:], 4)
			l.next = l.packet
		} else {
			l.next = l.rest
		}
		l.ready = pcapFileHeader
		return nil
	}
	l.next = l.rest
	return nil
}

// swapped returns the function that reports whether the lengths of a packet are swapped in
// this version of pcap, nil if it is not known.
func swapped(major, minor uint16) func(captured, length uint32) bool {
	switch {
	case major == 543 && minor == 0, major == 2 && minor < 3:
		return func(uint32, uint32) bool { return true }
	case major == 2 && minor == 3: // Programs did it in both ways.
		return func(captured, length uint32) bool { return captured > length }
	case major == 2:
		return func(uint32, uint32) bool { return false }
	}
	return nil
}

// packet mends the header of a packet of pcap.
func (l *lenient) packet() error {
	h, err := l.peek(pcapPacketHeader + l.extra)
	if err != nil {
		return err
	}
	captured, length := l.order.Uint32(h[8:]), l.order.Uint32(h[12:])
	if l.swapped(captured, length) {
		captured, length = length, captured
	}
	l.order.PutUint32(h[8:], captured)
	l.order.PutUint32(h[12:], max(captured, length))
	copy(l.buf[:], h)
	l.head = l.buf[:]
	if _, err := l.b.Discard(len(h)); err != nil {
		return err
	}
	l.ready = int(min(captured, maxPacket+1)) // pcapgo reads nothing behind a longer one.
	return nil
}

// block mends the header of a block of pcapng.
func (l *lenient) block() error {
	h, err := l.peek(12)
	if err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(h) == ngSection {
		if h, err = l.peek(16); err != nil {
			return err
		}
		l.order = binary.LittleEndian
		if l.order.Uint32(h[8:]) != ngOrderMagic {
			l.order = binary.BigEndian
		}
		if l.order.Uint16(h[12:]) == 1 && l.order.Uint16(h[14:]) == 2 {
			l.order.PutUint16(h[14:], 0)
		}
		l.description = 0
	}
	kind, size := l.order.Uint32(h), l.order.Uint32(h[4:])
	if size < 12 || size > maxBlock {
		l.next = l.rest // pcapgo will say that it is damaged.
		return nil
	}
	if size%4 != 0 {
		size += 4 - size%4
		l.order.PutUint32(h[4:], size)
	}
	switch kind {
	case ngSection, ngInterface:
		l.description += int(size) + blockCost
		if l.description > maxDescription {
			return fmt.Errorf("a section of pcapng is described in more than %d bytes", maxDescription)
		}
	case ngNames, ngStatistics:
		l.order.PutUint32(h, ngUnknown)
	case ngPacket:
		if id := l.order.Uint32(h[8:]); id < 1<<16 {
			l.order.PutUint32(h, ngOldPacket)
			l.order.PutUint16(h[8:], uint16(id))
			l.order.PutUint16(h[10:], 0) // packets lost before this one
		}
	}
	l.ready = int(size)
	return nil
}
