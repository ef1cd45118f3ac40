package smbdpeer

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Raw peer sends what a test gives it, malformed messages included. It receives, and
// posts the receives that it began with again. It does nothing else by itself: it does not
// negotiate, answer or grant. Its methods belong to one goroutine at a time. They fail the
// test if what they wait for does not come.
type Raw struct {
	// ID is the connection.
	ID ibv.ID

	// Sent and Received count Data Transfer messages, except those that Receive and Poll
	// return. The negotiation is not counted.
	Sent, Received int

	// Credits is how many Data Transfer messages the other end has receives for. All
	// methods that send or receive such messages update it, except Send.
	Credits int

	t        testing.TB
	patience time.Duration // patience is how long a method waits.
	pd       ibv.PD
	cq       ibv.CQ
	qp       ibv.QP
	mr       ibv.MR   // mr is the region of buf.
	buf      []byte   // buf is the memory of the receives that are posted again.
	further  [][]byte // further has the memory of those of PostReceive.
	regions  []ibv.MR
	over     chan struct{} // over is closed at the end of the connection.
	early    [][]byte      // early has messages that came while the peer waited for another one.
	flushed  bool          // flushed is set when a completion has shown the end.
}

// These are the receives that a Raw peer begins with, and posts again.
const (
	rawReceives    = 32
	rawReceiveSize = 9000
	rawFurther     = 64 // rawFurther is how many receives of PostReceive may be posted at a time.
)

// NewRaw makes a queue pair for a connection that will be made. The end of the test closes
// it. patience is how long methods wait before they fail the test.
func NewRaw(t testing.TB, id ibv.ID, patience time.Duration) *Raw {
	t.Helper()
	p, err := TryRaw(t, id, patience)
	p.must(err)
	return p
}

// TryRaw is like NewRaw, for a connection that may be over. An RDMA device makes no queue
// pair for such a connection.
func TryRaw(t testing.TB, id ibv.ID, patience time.Duration) (*Raw, error) {
	t.Helper()
	p := &Raw{ID: id, t: t, patience: patience, over: make(chan struct{}), buf: make([]byte, rawReceives*rawReceiveSize)}
	var err error
	p.pd, err = id.Device().AllocPD()
	p.must(err)
	p.cq, err = id.Device().CreateCQ(1024)
	p.must(err)
	p.mr, err = p.pd.RegMR(p.buf, ibv.AccessLocalWrite)
	p.must(err)
	p.qp, err = id.CreateQP(p.pd, ibv.QPInit{SendCQ: p.cq, RecvCQ: p.cq,
		Cap: ibv.QPCap{MaxSendWR: 512, MaxRecvWR: rawReceives + rawFurther, MaxSendSGE: 1, MaxRecvSGE: 1,
			MaxInline: min(64<<10, id.Device().Attr().MaxInline)}})
	if err != nil {
		p.release()
		return p, err
	}
	for i := range rawReceives {
		p.receive(i)
	}
	var once sync.Once
	id.Notify(func(ibv.Event) {
		once.Do(func() { close(p.over) })
		p.cq.Interrupt()
	})
	t.Cleanup(p.Close)
	return p, nil
}

func (p *Raw) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *Raw) receive(i int) {
	b := p.buf[i*rawReceiveSize:][:rawReceiveSize]
	p.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: b, LKey: p.mr.LKey()}}}})
}

// PostReceive posts a receive of n bytes, which is for one message.
func (p *Raw) PostReceive(n int) {
	p.t.Helper()
	b := make([]byte, n)
	p.further = append(p.further, b)
	_, err := p.qp.PostRecv([]ibv.RecvWR{{ID: uint64(rawReceives + len(p.further) - 1),
		SGL: []ibv.SGE{{Buf: b, LKey: p.region(b, ibv.AccessLocalWrite).LKey()}}}})
	p.must(err)
}

// received returns a message that has arrived, and posts its receive again if it is one of
// those that the peer began with.
func (p *Raw) received(wc *ibv.WC) []byte {
	i := int(wc.ID)
	if i >= rawReceives {
		return bytes.Clone(p.further[i-rawReceives][:wc.ByteLen])
	}
	b := bytes.Clone(p.buf[i*rawReceiveSize:][:wc.ByteLen])
	p.receive(i)
	return b
}

// Close drops the connection without a disconnect.
func (p *Raw) Close() {
	if p.qp == nil {
		return
	}
	p.qp.Close()
	p.qp = nil
	p.release()
}

// release releases all objects except the queue pair.
func (p *Raw) release() {
	p.cq.Close()
	for _, mr := range append(p.regions, p.mr) {
		mr.Close()
	}
	p.pd.Close()
	p.ID.Close()
}

// Over returns a channel that is closed when the device has reported the end of the
// connection.
func (p *Raw) Over() <-chan struct{} { return p.over }

// Send sends a message of these bytes. The connection may be over. The caller must not
// change b afterwards.
func (p *Raw) Send(b []byte) {
	p.t.Helper()
	p.SendTogether(b)
}

// SendTogether sends messages by one post, so that they arrive together.
func (p *Raw) SendTogether(msgs ...[]byte) {
	p.t.Helper()
	p.Sent += len(msgs)
	p.post(msgs)
}

func (p *Raw) post(msgs [][]byte) {
	p.t.Helper()
	var wrs []ibv.SendWR
	for _, b := range msgs {
		wr := ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited, SGL: []ibv.SGE{{Buf: b}}}
		if len(b) <= p.qp.Cap().MaxInline {
			wr.Flags |= ibv.SendInline
		} else {
			wr.SGL[0].LKey = p.region(b, 0).LKey()
		}
		wrs = append(wrs, wr)
	}
	p.qp.PostSend(wrs)
}

func (p *Raw) region(b []byte, access ibv.Access) ibv.MR {
	p.t.Helper()
	mr, err := p.pd.RegMR(b, access)
	p.must(err)
	p.regions = append(p.regions, mr)
	return mr
}

// Receive waits for the next message and returns nil at the end of the connection.
func (p *Raw) Receive() []byte {
	p.t.Helper()
	if len(p.early) > 0 {
		b := p.early[0]
		p.early = p.early[1:]
		return b
	}
	deadline := time.Now().Add(p.patience)
	var wc [1]ibv.WC
	for !p.flushed {
		p.must(p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		p.must(err)
		switch {
		case n == 0:
			if err := p.cq.Wait(deadline); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
				p.t.Fatalf("neither a message nor the end: %v", err)
			}
		case wc[0].Status != ibv.WCSuccess:
			p.flushed = true
		case wc[0].Op == ibv.WCRecv:
			return p.received(&wc[0])
		}
	}
	return nil
}

// Poll returns messages that have arrived. It does not wait.
func (p *Raw) Poll() (msgs [][]byte) {
	var wcs [8]ibv.WC
	n, _ := p.cq.Poll(wcs[:])
	for i := range wcs[:n] {
		switch {
		case wcs[i].Status != ibv.WCSuccess:
			p.flushed = true
		case wcs[i].Op == ibv.WCRecv:
			msgs = append(msgs, p.received(&wcs[i]))
		}
	}
	return msgs
}

// rdmaID is the ID of the work request of RDMA.
const rdmaID = 1 << 40

// RDMA writes b to the other end's memory by an RDMA Write, or fills b from that memory by
// an RDMA Read. It returns the status.
func (p *Raw) RDMA(op ibv.Opcode, b []byte, addr uint64, key uint32) ibv.WCStatus {
	p.t.Helper()
	mr := p.region(b, ibv.AccessLocalWrite)
	_, err := p.qp.PostSend([]ibv.SendWR{{ID: rdmaID, Op: op, Flags: ibv.SendSignaled,
		SGL: []ibv.SGE{{Buf: b, LKey: mr.LKey()}}, RemoteAddr: addr, RKey: key}})
	p.must(err)
	deadline := time.Now().Add(p.patience)
	var wc [1]ibv.WC
	for {
		p.must(p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		p.must(err)
		switch {
		case n == 0:
			if err := p.cq.Wait(deadline); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
				p.t.Fatalf("no completion of the %v: %v", op, err)
			}
		case wc[0].ID == rdmaID:
			p.flushed = p.flushed || wc[0].Status != ibv.WCSuccess
			return wc[0].Status
		case wc[0].Status != ibv.WCSuccess:
			p.flushed = true
		case wc[0].Op == ibv.WCRecv:
			p.early = append(p.early, p.received(&wc[0]))
		}
	}
}

// Register registers memory that the other end may read and write.
func (p *Raw) Register(b []byte) (addr uint64, key uint32) {
	p.t.Helper()
	mr := p.region(b, ibv.AccessLocalWrite|ibv.AccessRemoteWrite|ibv.AccessRemoteRead)
	return mr.Addr(), mr.RKey()
}

// WaitEnd waits for the end of the connection.
func (p *Raw) WaitEnd() {
	p.t.Helper()
	for p.Receive() != nil {
	}
	select {
	case <-p.over:
	case <-time.After(p.patience):
		p.t.Fatal("the connection goes on")
	}
}

// ReceiveData waits for the next Data Transfer message, and counts the credits in it. ok is
// false at the end of the connection.
func (p *Raw) ReceiveData() (h DataTransfer, payload []byte, ok bool) {
	p.t.Helper()
	h, payload, _, ok = p.receiveData()
	return h, payload, ok
}

func (p *Raw) receiveData() (h DataTransfer, payload, message []byte, ok bool) {
	p.t.Helper()
	if message = p.Receive(); message == nil {
		return h, nil, nil, false
	}
	h, payload, err := ParseDataTransfer(message)
	p.must(err)
	p.Credits += int(h.CreditsGranted)
	p.Received++
	return h, payload, message, true
}

// ReceiveTransfer waits for the next message with a transfer header. ok is false at the end
// of the connection.
func (p *Raw) ReceiveTransfer() (t Transfer, payload []byte, ok bool) {
	p.t.Helper()
	for {
		h, payload, message, ok := p.receiveData()
		if !ok {
			return t, nil, false
		}
		if h.Flags&FlagTransfer != 0 {
			t, err := ParseTransfer(message)
			p.must(err)
			return t, payload, true
		}
	}
}

// ExpectTransfer is like ReceiveTransfer. It fails the test if the message is not of this
// kind.
func (p *Raw) ExpectTransfer(kind TransferKind) Transfer {
	p.t.Helper()
	t, _, ok := p.ReceiveTransfer()
	if !ok {
		p.t.Fatal("the connection has ended")
	}
	if t.Kind != kind {
		p.t.Fatalf("kind %d was to come and not %+v", kind, t)
	}
	return t
}

// ExpectFIN waits for the end of the other end's stream.
func (p *Raw) ExpectFIN() {
	p.t.Helper()
	for {
		h, _, ok := p.ReceiveData()
		if !ok {
			p.t.Fatal("the connection has ended")
		}
		if h.Flags&FlagFIN != 0 {
			return
		}
	}
}

// Negotiate sends a Negotiate Request, waits for the response, and counts the credits in
// it.
func (p *Raw) Negotiate(m NegotiateRequest) NegotiateResponse {
	p.t.Helper()
	p.post([][]byte{m.Append(nil)})
	resp, err := ParseNegotiateResponse(p.Receive())
	p.must(err)
	p.Credits = int(resp.CreditsGranted)
	return resp
}

// Respond waits for a Negotiate Request, which it returns, and sends a Negotiate Response.
func (p *Raw) Respond(m NegotiateResponse) NegotiateRequest {
	p.t.Helper()
	b := p.Receive()
	request, err := ParseNegotiateRequest(b)
	p.must(err)
	if len(b) != NegotiateRequestLen {
		p.t.Fatalf("a Negotiate Request of %d bytes", len(b))
	}
	p.post([][]byte{m.Append(nil)})
	return request
}

// WaitCredit receives until there is a credit.
func (p *Raw) WaitCredit() {
	p.t.Helper()
	for p.Credits < 1 {
		if _, _, ok := p.ReceiveData(); !ok {
			p.t.Fatal("the connection has ended")
		}
	}
}

// SendData waits for a credit and sends a message.
func (p *Raw) SendData(b []byte) {
	p.t.Helper()
	p.WaitCredit()
	p.Credits--
	p.Send(b)
}

// SendTransfer is SendData for a message with a transfer header and without payload.
func (p *Raw) SendTransfer(t Transfer) {
	p.t.Helper()
	p.SendData(t.Message(nil))
}

// Payload sends a message with n bytes of payload. It does not wait for the credit that it
// uses.
func (p *Raw) Payload(n int) {
	p.t.Helper()
	p.Credits--
	p.Send(Segment(n, 0))
}

// Grant sends a message that only grants credits. It does not wait for the credit that it
// uses.
func (p *Raw) Grant(n uint16) {
	p.t.Helper()
	p.Credits--
	p.Send(EmptySegment(0, int(n)))
}

// GrantWith waits for a credit, and sends a message that grants credits with these flags.
func (p *Raw) GrantWith(n uint16, flags uint16) {
	p.t.Helper()
	p.SendData(EmptySegment(flags, int(n)))
}

// RequestResponse sends a message that requests a response and grants n credits.
func (p *Raw) RequestResponse(n int) {
	p.t.Helper()
	p.SendData(DataTransfer{CreditsRequested: 16, CreditsGranted: uint16(n), Flags: FlagResponseRequested}.Message(HeaderLen))
}

// Segment returns a message with n bytes of payload, which are those of
// DataTransfer.Message. It announces rest more bytes, asks for 16 credits and grants one.
func Segment(n, rest int) []byte {
	return DataTransfer{CreditsRequested: 16, CreditsGranted: 1,
		DataOffset: PayloadOffset, DataLength: uint32(n), RemainingDataLength: uint32(rest)}.Message(PayloadOffset + n)
}

// EmptySegment returns a message without payload and with these flags. It asks for 16
// credits and grants some.
func EmptySegment(flags uint16, granted int) []byte {
	return DataTransfer{CreditsRequested: 16, CreditsGranted: uint16(granted), Flags: flags}.Message(HeaderLen)
}

// Begin begins transfer id of n bytes to the other end. If data moves by RDMA Read, it
// offers the memory at addr with key. Otherwise it sends a request.
func (p *Raw) Begin(reads bool, id uint32, n int, addr uint64, key uint32) {
	p.t.Helper()
	if reads {
		p.SendTransfer(Transfer{Kind: Offer, ID: id, Addr: addr, Key: key, Length: uint32(n)})
	} else {
		p.SendTransfer(Transfer{Kind: Request, ID: id, Length: uint32(n)})
	}
}

// BeginFirst begins transfer 1 with n bytes of memory, which it returns.
func (p *Raw) BeginFirst(reads bool, n int) []byte {
	p.t.Helper()
	b := make([]byte, n)
	addr, key := p.Register(b)
	p.Begin(reads, 1, n, addr, key)
	return b
}

// WithdrawTransfer withdraws a transfer if data moves by RDMA Read. Otherwise it sends that
// the transfer ends here.
func (p *Raw) WithdrawTransfer(reads bool, id uint32, flags uint8) {
	p.t.Helper()
	p.SendTransfer(Withdrawal(reads, id, flags))
}

// Withdrawal returns the header that WithdrawTransfer sends.
func Withdrawal(reads bool, id uint32, flags uint8) Transfer {
	if reads {
		return Transfer{Kind: Withdraw, Flags: flags, ID: id}
	}
	return Transfer{Kind: Written, Flags: flags | TransferEnd, ID: id}
}

// ExpectBegin waits for the beginning of a transfer from the other end.
func (p *Raw) ExpectBegin(reads bool) Transfer {
	p.t.Helper()
	if reads {
		return p.ExpectTransfer(Offer)
	}
	return p.ExpectTransfer(Request)
}

// Answer writes b to the memory of a grant, which has the same length, and reports that.
func (p *Raw) Answer(grant Transfer, b []byte) {
	p.t.Helper()
	if status := p.RDMA(ibv.OpWrite, b, grant.Addr, grant.Key); status != ibv.WCSuccess {
		p.t.Fatalf("the RDMA Write for %+v: %v", grant, status)
	}
	p.SendTransfer(Transfer{Kind: Written, ID: grant.ID, Length: grant.Length})
}

// Take moves all data of a transfer that the other end has begun, and returns it.
func (p *Raw) Take(reads bool, begun Transfer) []byte {
	p.t.Helper()
	b := make([]byte, begun.Length)
	if !reads {
		addr, key := p.Register(b)
		p.SendTransfer(Transfer{Kind: Grant, ID: begun.ID, Addr: addr, Key: key, Length: begun.Length})
		p.ExpectTransfer(Written)
		return b
	}
	if status := p.RDMA(ibv.OpRead, b, begun.Addr, begun.Key); status != ibv.WCSuccess {
		p.t.Fatalf("the RDMA Read for %+v: %v", begun, status)
	}
	p.SendTransfer(Transfer{Kind: Done, ID: begun.ID, Length: begun.Length})
	return b
}
