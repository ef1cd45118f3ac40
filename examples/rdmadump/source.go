package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/rdmanet/rdmanet/capture"
)

// source is a capture that is being read.
type source struct {
	name string
	size int64 // size is the length of the file in bytes, 0 if it is not known.
	read int64 // read is how many bytes were read so far.
	file *os.File
	idle func()      // idle is called before a read that may wait for packets.
	stop atomic.Bool // stop ends the reading of a file. All that comes through a pipe is read.

	next func() ([]byte, gopacket.CaptureInfo, error)
	link func(ci *gopacket.CaptureInfo) capture.LinkType
}

const (
	readAhead = 256 << 10
	maxPacket = 16 << 20 // maxPacket is in bytes. A packet that claims to be longer is not read.
)

// open opens the file with that name, or standard input if it is empty or "-".
func open(name string, stdin io.Reader) (*source, error) {
	s := &source{name: name, idle: func() {}}
	in := stdin
	if name == "" || name == "-" {
		s.name = "standard input"
	} else {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		s.file, in = f, f
	}
	if f, ok := in.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			s.size = info.Size()
		}
	}
	if err := s.start(in); err != nil {
		s.close()
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	return s, nil
}

func (s *source) start(in io.Reader) error {
	b := bufio.NewReaderSize(&counter{in, s}, readAhead)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return err
		}
		b = bufio.NewReaderSize(z, readAhead)
	}
	magic, err := b.Peek(4)
	if err != nil {
		return errors.New("too short for a capture")
	}
	if bytes.Equal(magic, []byte{0x0a, 0x0d, 0x0d, 0x0a}) {
		r, err := pcapgo.NewNgReader(newLenient(b), pcapgo.NgReaderOptions{WantMixedLinkType: true})
		if err != nil {
			return err
		}
		s.next = r.ZeroCopyReadPacketData
		s.link = func(ci *gopacket.CaptureInfo) capture.LinkType {
			if len(ci.AncillaryData) > 0 {
				if l, ok := ci.AncillaryData[0].(layers.LinkType); ok {
					return capture.LinkType(l)
				}
			}
			return capture.LinkType(r.LinkType())
		}
		return nil
	}
	r, err := pcapgo.NewReader(newLenient(b))
	if err != nil {
		return fmt.Errorf("neither pcap nor pcapng: %w", err)
	}
	r.SetSnaplen(maxPacket) // The snap length in the file is often wrong.
	link := capture.LinkType(r.LinkType())
	s.next = r.ZeroCopyReadPacketData
	s.link = func(*gopacket.CaptureInfo) capture.LinkType { return link }
	return nil
}

// each calls f with every packet. The error says where the file is damaged or ends too
// early. All packets in front of that place have been passed to f.
func (s *source) each(f func(*capture.Packet)) error {
	var p capture.Packet
	for n := 1; ; n++ {
		if s.size > 0 && s.stop.Load() {
			return fmt.Errorf("interrupted before packet %d", n)
		}
		data, ci, err := s.packet()
		if err == io.EOF {
			if ci.CaptureLength == 0 {
				return nil
			}
			err = io.ErrUnexpectedEOF // There is a header and nothing behind it.
		}
		if err != nil {
			where := fmt.Sprintf("packet %d cannot be read", n)
			if s.size > 0 {
				if left := s.size - s.read; left > 0 {
					where += fmt.Sprintf(", nor what comes behind it, at least %d bytes", left)
				}
			}
			return fmt.Errorf("%s: %w", where, err)
		}
		p = capture.Packet{Time: ci.Timestamp, Link: s.link(&ci), Data: data, Length: ci.Length}
		f(&p)
	}
}

// packet reads the next packet. If an int has 32 bits, the pcapng reader takes some numbers
// in a damaged file for negative ones, and panics.
func (s *source) packet() (data []byte, ci gopacket.CaptureInfo, err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("damaged: %v", x)
		}
	}()
	return s.next()
}

func (s *source) close() {
	if s.file != nil {
		s.file.Close()
	}
}

// counter counts the bytes that are read.
type counter struct {
	r io.Reader
	s *source
}

func (c *counter) Read(b []byte) (int, error) {
	c.s.idle()
	n, err := c.r.Read(b)
	c.s.read += int64(n)
	return n, err
}
