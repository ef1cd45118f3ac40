package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"flag"
	"hash/crc32"
	"io"
	"os"
	"runtime"
	"testing"
	"time"
)

var (
	streamSize = flag.Int64("stream", 128, "`MiB` that TestStream generates and reads")
	streamFile = flag.String("save", "", "`file` that TestStream writes the capture to as well")
)

// stream is a capture that nobody has in full: 1 MiB RDMA Writes over RoCEv2 at
// MTU 4096, each acknowledged, on connections that follow each other. Of every
// 5000 packets one is missing.
type stream struct {
	left          int64 // bytes to come
	ready         []byte
	data, ack     []byte // packets, with their record headers
	n, qp, psn    uint32
	writes, gaps  uint64
	mem           runtime.MemStats
	sampled, peak uint64 // bytes that were read then; most of the heap that was in use
	read          uint64
}

const (
	mtu       = 4096
	perWrite  = 1 << 20 / mtu
	perConn   = 64 * perWrite // packets until the next connection
	dropEvery = 5000
	headers   = 16 + 14 + 20 + 8 + 12 // up to the BTH's end
)

func newStream(size int64) *stream {
	s := &stream{left: size, qp: 17}
	s.ready = []byte("\xd4\xc3\xb2\xa1\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x01\x00\x00\x00")
	s.data, s.ack = roce(16+mtu, 1, 2), roce(4, 2, 1)
	return s
}

// roce returns a packet with n bytes behind its BTH, its ICRC not counted.
func roce(n int, from, to byte) []byte {
	be, le := binary.BigEndian, binary.LittleEndian
	b := make([]byte, headers+n+4)
	le.PutUint32(b[8:], uint32(len(b)-16))
	le.PutUint32(b[12:], uint32(len(b)-16))
	ip := b[30:]
	be.PutUint16(b[28:], 0x0800)
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	copy(ip[12:], []byte{192, 0, 2, from, 192, 0, 2, to})
	be.PutUint16(ip[20:], 50000)
	be.PutUint16(ip[22:], 4791)
	be.PutUint16(ip[34-4:], 0xffff) // P_Key
	return b
}

// finish sets what changes in a packet of size bytes with its record header, and
// appends it.
func (s *stream) finish(b []byte, op byte, qp, psn uint32) {
	be, le := binary.BigEndian, binary.LittleEndian
	le.PutUint32(b, s.n/100000)
	le.PutUint32(b[4:], s.n%100000*10)
	le.PutUint32(b[8:], uint32(len(b)-16))
	le.PutUint32(b[12:], uint32(len(b)-16))
	ip := b[30:]
	be.PutUint16(ip[2:], uint16(len(ip)))
	be.PutUint16(ip[24:], uint16(len(ip)-20))
	ip[28] = op
	be.PutUint32(ip[32:], qp)
	be.PutUint32(ip[36:], psn&0xffffff)
	// The ICRC is counted with ones in place of what routers change (InfiniBand
	// Architecture Specification, annex A17).
	var masked [8 + 40]byte
	for i := range 8 {
		masked[i] = 0xff
	}
	m := masked[8:]
	copy(m, ip[:40])
	m[1], m[8], m[10], m[11], m[26], m[27], m[32] = 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff
	end := len(b) - 4
	le.PutUint32(b[end:], crc32.Update(crc32.ChecksumIEEE(masked[:]), crc32.IEEETable, b[headers:end]))
	s.ready = append(s.ready, b...)
}

// next appends the next packet, and what answers it.
func (s *stream) next() {
	s.ready = s.ready[:0]
	op, b := byte(0x07), s.data[:headers+mtu+4]
	switch s.n % perWrite {
	case 0:
		op, b = 0x06, s.data
		be := binary.BigEndian
		be.PutUint64(b[headers:], 1<<40)
		be.PutUint32(b[headers+8:], 99)
		be.PutUint32(b[headers+12:], 1<<20)
	case perWrite - 1:
		op = 0x08
	}
	if s.n%dropEvery == dropEvery/2 {
		s.gaps++
	} else {
		s.finish(b, op, s.qp, s.psn)
	}
	if op == 0x08 {
		s.writes++
		s.ack[headers] = 0x1f
		s.finish(s.ack, 0x11, s.qp+1<<20, s.psn)
	}
	s.n++
	s.psn++
	if s.n%perConn == 0 {
		s.qp, s.psn = 17+(s.qp-16)%(1<<19), s.qp*1000
	}
}

func (s *stream) Read(p []byte) (n int, err error) {
	for len(s.ready) == 0 {
		if s.left <= 0 {
			return 0, io.EOF
		}
		s.next()
		s.left -= int64(len(s.ready))
	}
	n = copy(p, s.ready)
	s.ready = s.ready[n:]
	if s.read += uint64(n); s.read-s.sampled >= 8<<20 {
		s.sampled = s.read
		runtime.ReadMemStats(&s.mem)
		s.peak = max(s.peak, s.mem.HeapInuse+s.mem.StackInuse)
	}
	return n, nil
}

// A capture of any length is read in little memory: of what is given with -stream
// nothing is kept but one line a connection for the summary.
func TestStream(t *testing.T) {
	const bound = 96 << 20 // with 16 MiB for what is not complete
	for _, o := range []options{{stats: true, json: true}, {json: true}} {
		s := newStream(*streamSize << 20)
		var in io.Reader = s
		if *streamFile != "" {
			f, err := os.Create(*streamFile)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			in = io.TeeReader(s, f)
		}
		out, w := io.Pipe()
		sum := make(chan report, 1)
		o.memory, o.filter.all = 16, true
		begun := time.Now()
		go func() {
			var r report
			messages := uint64(0)
			for d := json.NewDecoder(bufio.NewReaderSize(out, 1<<20)); ; messages++ {
				if d.Decode(&r) != nil {
					break
				}
			}
			if !o.stats {
				r = report{Packets: messages}
			}
			sum <- r
		}()
		if err := run(&o, in, w, io.Discard); err != nil {
			t.Fatal(err)
		}
		w.Close()
		r := <-sum
		seconds := time.Since(begun).Seconds()
		t.Logf("%d MB in %.2f s, %.0f MB/s with what it takes to generate them; heap of %.1f MB at most", s.read/1e6, seconds, float64(s.read)/1e6/seconds, float64(s.peak)/1e6)
		if s.peak > bound {
			t.Errorf("%d bytes of heap, more than %d", s.peak, bound)
		}
		if !o.stats {
			if r.Packets < s.writes {
				t.Errorf("%d lines for %d Writes", r.Packets, s.writes)
			}
			continue
		}
		if want := uint64(s.n) - s.gaps + s.writes; r.Packets != want {
			t.Errorf("%d packets, want %d", r.Packets, want)
		}
		writes, lost := uint64(0), uint64(0)
		for _, c := range r.Connections {
			for _, side := range c.Sides {
				writes += side.Messages["Write"]
				lost += side.Lost
			}
		}
		if left := (s.n + perWrite - 1) / perWrite; writes != uint64(left) || lost != s.gaps {
			t.Errorf("%d Writes, %d packets lost; want %d, %d", writes, lost, left, s.gaps)
		}
	}
}
