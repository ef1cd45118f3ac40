package rdmanet

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Config holds the settings of connections and of datagrams. The zero value is ready for
// use. Dial and Listen return an error for a size that is out of range. A Config must not
// be changed while a Dialer or ListenConfig that holds it is in use.
type Config struct {
	// Device names the device to use. "iwarp" is the software device, and "rdma" is any
	// RDMA device. Any other name is that of one RDMA device, such as "mlx5_0". Empty means
	// the RDMA device that leads to the address, and then the software device; a Listener
	// uses both. The environment variable RDMANET_DEVICE overrides this field.
	Device string

	// RequireRDMA forbids the software device. Dial and Listen fail if no RDMA device leads
	// to the address.
	RequireRDMA bool

	// SameHost says whether connections of the software device between two processes of this
	// host use shared memory in place of TCP, where the system has that: "on", "off", or
	// "require", which fails without, for tests. Empty means what the environment variable
	// RDMANET_SAMEHOST says, and "on" without it. Both ends must have it on. Info tells
	// whether it is used, and if not, why.
	SameHost string

	// Provider, if not nil, is where all devices come from. It overrides Device,
	// RequireRDMA and RDMANET_DEVICE. It is for tests, and for devices that the program has
	// set up itself (see package ibv/rdmacore).
	Provider ibv.Provider

	// MaxSendSize bounds a segment that this side sends, in bytes: 256 to 1 MiB. A segment
	// is one RDMA Send with its headers. 0 means 65560 (64 KiB and a header) on devices
	// whose registered memory costs nothing until it is used. On others it means 8192, and
	// 65560 while bulk data moves if MaxReceiveSize is 0 too and the peer's program has set
	// neither. With a peer that is not rdmanet the bound is 8136 at most, which all known
	// peers accept.
	MaxSendSize int

	// MaxReceiveSize bounds a segment that the peer sends, in bytes: 256 to 1 MiB. Each
	// receive buffer has this size. 0 means 65560 (64 KiB and a header) on devices whose
	// registered memory costs nothing until it is used. On others it means 8192, and 65560
	// while bulk data comes, under the same conditions as with MaxSendSize. With a peer that
	// is not rdmanet the bound is 8136 at most, which all known peers accept.
	MaxReceiveSize int

	// MaxFragmentedSize bounds a message that the peer sends in segments with WriteMsg, in
	// bytes: 131080 to 1 GiB. 0 means 1 MiB. Write and Read carry any amount. Between
	// rdmanet peers longer messages go by large transfers, unless TransferSize is negative
	// on either side. Between software devices on Linux they go in segments, up to 1 GiB.
	MaxFragmentedSize int

	// TransferSize is the length in bytes from which Write and WriteMsg send data by a
	// large transfer, between rdmanet peers: 4096 to 1 GiB. The devices then move the data
	// by RDMA, and the call returns when the peer has taken it. ReadFrom sends 256 KiB at a
	// time, so it uses large transfers only if this length is no greater. It does not wait
	// for the peer.
	//
	// On RDMA devices 0 means 512 KiB, and 128 KiB for ReadFrom. On the software device,
	// which sends straight from any memory, 0 means 4 MiB for data in a Buffer, and never
	// for other data. Between software devices on Linux 0 means never. A negative value means
	// never, in both directions.
	//
	// With a value above 0 at either end a connection between software devices uses credits as
	// over RDMA devices, since large transfers need them. Then it takes less that nobody reads,
	// and what was written last may be lost when a process ends without Close.
	TransferSize int

	// NoRDMARead makes large transfers use RDMA Write in place of RDMA Read, in both
	// directions. They also do so if a device cannot read.
	NoRDMARead bool

	// InitialReceiveCredits is how many receive buffers a connection starts with, and
	// returns to when it is idle: 4 to 255. 0 means 4. MaxReceiveCredits bounds it. With
	// [Extensions].HeldSends a connection has 256 KiB of them if that is more.
	InitialReceiveCredits int

	// MaxReceiveCredits is how many receive buffers a connection may grow to while the peer
	// asks for more and the reader keeps up: 4 to 255. 0 means as many as make 4 MiB, but
	// at least 16. Buffers of 64 KiB for bulk data are fewer, so that they take no more memory.
	MaxReceiveCredits int

	// ReceiveMemory bounds the memory in bytes that all connections of a device together
	// use for receive buffers and for copies of what nobody has read: 64 KiB to 1 TiB. 0 means
	// 1 GiB. Twice InitialReceiveCredits of each connection do not count, because an idle
	// connection may keep that many, and neither do 256 KiB of copies, so that each has some
	// room. With [Extensions].HeldSends the kernels, or the memory that two processes share, hold
	// what is unread, and all copies count.
	//
	// A connection that finds the memory used up keeps its buffers. It grows when other
	// connections have given buffers back, which they do when they are idle. So peers that
	// send much and then stay silent cannot hold more than this.
	ReceiveMemory int

	// SendCreditTarget is how many receive buffers the peer is asked for: 4 to 255. 0 means
	// 255.
	SendCreditTarget int

	// TransferMemory bounds the memory in bytes, outside the Go heap, that all connections
	// of a device together use to copy large transfers to or from ordinary memory: 256 KiB
	// to 1 GiB. 0 means 64 MiB. A connection that finds the memory used up goes on with its
	// segments and its receive buffers. Memory is given back about a second after its last
	// use.
	TransferMemory int

	// KeepAlive is how long nothing may arrive from the peer until this side asks for an
	// answer. If none arrives in the same time again, or in 20 s if that is less, the
	// connection is broken. So when the link is cut, all calls fail with ETIMEDOUT within
	// twice KeepAlive, or within KeepAlive and 20 s. A side answers even if its program
	// does not read, by its device if need be.
	//
	// Between software devices on Linux the kernels answer each other, as for TCP: a process
	// that is stopped keeps its connections. There KeepAlive is at least 1 s and the time for
	// an answer 3 s, and kernels may be late by an eighth. On RDMA devices the process has to
	// answer.
	//
	// 0 means 120 s. A negative value means that this side never asks, and leaves it to the
	// device to find out; see the package's comment.
	KeepAlive time.Duration

	// NegotiateTimeout bounds the set-up of a connection after its address is known, on
	// either side. On the active side the context's deadline applies as well. 0 or a
	// negative value means 20 s on the passive side. On the active side it means 120 s, and
	// the device's own bound for the time until the peer answers.
	NegotiateTimeout time.Duration

	// LingerTimeout bounds how long a connection goes on after Close to bring what was
	// written to the peer. Close does not wait for that. The connection is given up when
	// nothing has moved for this time, and after twelve times as long in any case. 0 means
	// 5 s. A negative value gives up at once, and may lose data. Behind CloseWrite a peer that
	// sends nothing may not know of Close, and the connection goes on for this time too.
	//
	// At most 4096 connections of a process linger at a time; see [Lingering]. If a call is
	// in the middle of a large transfer at Close, a peer that is silent for a second is
	// given up.
	LingerTimeout time.Duration

	// BusyPoll is how long Read and Write poll for a completion before they sleep. It
	// trades processor time for latency. A negative value means that no call ever polls.
	//
	// 0 means that a Read polls on RDMA devices while it waits for the answer to what was
	// sent, for a millisecond at most. It does so only if polling has paid before. It also
	// needs spare processors: fewer connections than half of GOMAXPROCS are being served,
	// and no other call of the process polls.
	BusyPoll time.Duration

	// Logger receives failures at level Debug: of set-ups, connections, queue pairs for
	// datagrams, and devices. At level Warn it receives a line for each Conn, Listener and
	// PacketConn that the program drops without Close. If it is nil, failures are not
	// logged, and the warnings go to slog.Default().
	Logger *slog.Logger
}

const (
	// minSegment is the least MaxSendSize and MaxReceiveSize in bytes.
	minSegment = 256

	// maxSegment is the greatest MaxSendSize and MaxReceiveSize in bytes.
	maxSegment = 1 << 20

	// plainSegment is the longest segment with a plain peer. Windows refuses a greater
	// PreferredSendSize.
	plainSegment = 8136

	// pagedSegment is the default size of a segment on devices that do not pin memory.
	pagedSegment = 64<<10 + dataOffset

	// pinnedSegment is the default size of a segment on devices that pin memory.
	pinnedSegment = 8192

	// largeSegment is the size of large receives in bytes: 64 KiB of payload and the header.
	largeSegment = pagedSegment

	// defaultLarge is how many large receives may be posted or unread if the program has not
	// set MaxReceiveCredits. It is about as much memory as the most normal receives take.
	defaultLarge = 32

	// plainReadWrite is the MaxReadWriteSize in the negotiation. The program decides
	// whether any such RDMA is used, but Linux on siw cannot connect if none is allowed.
	plainReadWrite = 8 << 20

	// creditCeiling is the greatest number of credits that a Config may ask for.
	creditCeiling = 255

	// minTransfer is the least TransferSize in bytes.
	minTransfer = 4096

	// defaultTransferSize is the default TransferSize. For less data, waiting for the peer costs
	// more than copying (docs/performance.md).
	defaultTransferSize = 512 << 10

	// defaultReadFromTransferSize is the default length in bytes from which ReadFrom uses a transfer.
	defaultReadFromTransferSize = 128 << 10

	// inlineTransfer is the default TransferSize for data in a Buffer, on devices that send
	// segments straight from the program's memory.
	inlineTransfer = 4 << 20

	// defaultFragmented is the default MaxFragmentedSize in bytes.
	defaultFragmented = 1 << 20

	// defaultTransferMemory is the default TransferMemory in bytes.
	defaultTransferMemory = 64 << 20

	// minReceiveMemory is the least ReceiveMemory in bytes.
	minReceiveMemory = 64 << 10

	// maxReceiveMemory is the greatest ReceiveMemory in bytes.
	maxReceiveMemory = min(1<<40, math.MaxInt)

	// defaultReceiveMemory is the default ReceiveMemory in bytes.
	defaultReceiveMemory = 1 << 30

	// defaultLinger is the default LingerTimeout.
	defaultLinger = 5 * time.Second
)

var discardLogger = slog.New(slog.DiscardHandler)

// check returns an error that names all fields that are out of range.
func (c *Config) check() error {
	var errs []error
	inRange := func(name string, v, lo, hi int) {
		if v != 0 && (v < lo || v > hi) {
			errs = append(errs, fmt.Errorf("rdmanet: Config.%s is %d: must be 0 or %d to %d", name, v, lo, hi))
		}
	}
	inRange("MaxSendSize", c.MaxSendSize, minSegment, maxSegment)
	inRange("MaxReceiveSize", c.MaxReceiveSize, minSegment, maxSegment)
	inRange("MaxFragmentedSize", c.MaxFragmentedSize, minFragmentedSize+8, sizeCeiling)
	if c.TransferSize > 0 {
		inRange("TransferSize", c.TransferSize, minTransfer, transferCeiling)
	}
	inRange("InitialReceiveCredits", c.InitialReceiveCredits, minCredits, creditCeiling)
	inRange("MaxReceiveCredits", c.MaxReceiveCredits, minCredits, creditCeiling)
	inRange("ReceiveMemory", c.ReceiveMemory, minReceiveMemory, maxReceiveMemory)
	inRange("TransferMemory", c.TransferMemory, regmem.ChunkSize, sizeCeiling)
	inRange("SendCreditTarget", c.SendCreditTarget, minCredits, creditCeiling)
	if _, err := iwarp.ParseSameHost(c.SameHost); err != nil {
		errs = append(errs, fmt.Errorf("rdmanet: Config.SameHost %w", err))
	}
	return errors.Join(errs...)
}

// log logs a failure, if there is a Logger.
func (c *Config) log(msg string, addr net.Addr, err error) {
	if c.Logger != nil {
		c.Logger.Debug("rdmanet: "+msg, "remote", addr, "err", err)
	}
}

// settings is a Config with the defaults for one device filled in. The fields have the
// units of Config.
type settings struct {
	maxSend, maxReceive, maxFragmented int

	// initial, maximum and target are credits: InitialReceiveCredits, MaxReceiveCredits and
	// SendCreditTarget.
	initial, maximum, target int

	// transfers is set if large transfers are offered to the peer.
	transfers bool
	hold      bool // the device may hold Sends, see hold.go

	// transferMin is the length in bytes from which a write goes by a transfer. bufferTransferMin is
	// that length for data in a Buffer, and readFromTransferMin for data of ReadFrom.
	transferMin, bufferTransferMin, readFromTransferMin int

	// noRead is NoRDMARead.
	noRead bool

	// large is set if large receives are offered to the peer: the program has bounded
	// segments in neither direction. mostLarge is how many of them may be posted or unread.
	large     bool
	mostLarge int

	transferMemory, receiveMemory int

	// keepAlive, linger and busyPoll are those of Config. probe is how long this side waits
	// for the answer to a keep-alive probe.
	keepAlive, probe, linger, busyPoll time.Duration

	negotiate time.Duration

	// failureLog receives failures, and is never nil.
	failureLog *slog.Logger

	// programLog is the program's Logger, or nil.
	programLog *slog.Logger
}

// settings returns the settings for connections of a device. passive is set for connections
// that are accepted.
func (c *Config) settings(dev ibv.Device, passive bool) settings {
	segment := pagedSegment
	if regmem.PinsMemory(dev) {
		segment = pinnedSegment
	}
	transferMin, bufferMin, readFromMin := defaultTransferSize, defaultTransferSize, defaultReadFromTransferSize
	// The device sends segments from where the data lies, without a copy.
	if dev.Attr().MaxInline >= segment {
		transferMin, bufferMin, readFromMin = math.MaxInt, inlineTransfer, math.MaxInt
	}
	or := func(v, def int) int {
		if v == 0 {
			return def
		}
		return v
	}
	s := settings{
		maxSend:             or(c.MaxSendSize, segment),
		maxReceive:          or(c.MaxReceiveSize, segment),
		maxFragmented:       or(c.MaxFragmentedSize, defaultFragmented),
		target:              or(c.SendCreditTarget, creditCeiling),
		keepAlive:           c.KeepAlive,
		linger:              c.LingerTimeout,
		busyPoll:            c.BusyPoll,
		negotiate:           c.NegotiateTimeout,
		failureLog:          c.Logger,
		programLog:          c.Logger,
		transfers:           c.TransferSize >= 0,
		hold:                c.TransferSize <= 0 && dev.Attr().Caps.Has(ibv.CapHoldSends),
		transferMin:         or(c.TransferSize, transferMin),
		bufferTransferMin:   or(c.TransferSize, bufferMin),
		readFromTransferMin: or(c.TransferSize, readFromMin),
		noRead:              c.NoRDMARead,
		large:               c.MaxSendSize == 0 && c.MaxReceiveSize == 0,
		transferMemory:      or(c.TransferMemory, defaultTransferMemory),
		receiveMemory:       or(c.ReceiveMemory, defaultReceiveMemory),
	}
	s.maximum = or(c.MaxReceiveCredits, min(creditCeiling, max(16, 4<<20/s.maxReceive)))
	s.mostLarge = min(s.maximum, defaultLarge)
	if c.MaxReceiveCredits != 0 {
		s.mostLarge = s.maximum * s.maxReceive / largeSegment
	}
	s.initial = min(or(c.InitialReceiveCredits, 4), s.maximum)
	if s.keepAlive == 0 {
		s.keepAlive = 120 * time.Second
	}
	s.probe = min(s.keepAlive, 20*time.Second)
	if s.linger == 0 {
		s.linger = defaultLinger
	}
	if s.negotiate <= 0 {
		s.negotiate = 120 * time.Second
		if passive {
			s.negotiate = 20 * time.Second
		}
	}
	if s.failureLog == nil {
		s.failureLog = discardLogger
	}
	return s
}

// features returns the extensions that the private data offers.
func (s *settings) features() uint16 {
	f := featureFIN | featureMessages
	if s.transfers {
		f |= featureTransfer
	}
	if s.noRead {
		f |= featureNoRead
	}
	if s.large {
		f |= featureLarge
	}
	if s.hold {
		f |= featureHold
	}
	return f
}

// limits returns what this end brings to the negotiation with a peer.
func (s *settings) limits(peer privateData) limits {
	l := limits{
		maxSend:          uint32(s.maxSend),
		maxReceive:       uint32(s.maxReceive),
		maxFragmented:    uint32(s.maxFragmented),
		creditsRequested: uint16(s.target),
		creditsGranted:   uint16(s.maximum),
		maxReadWrite:     plainReadWrite,
	}
	if !peer.rdmanet {
		l.maxSend = min(l.maxSend, plainSegment)
		l.maxReceive = min(l.maxReceive, plainSegment)
	}
	return l
}
