package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// callUpper makes calls unary calls and checks each answer.
func callUpper(ctx context.Context, cc *grpc.ClientConn, calls int) error {
	for i := range calls {
		out := new(text)
		if err := cc.Invoke(ctx, methodUpper, wrapperspb.String(fmt.Sprintf("call %d", i)), out); err != nil {
			return fmt.Errorf("unary call %d: %w", i, err)
		}
		if want := fmt.Sprintf("CALL %d", i); out.Value != want {
			return fmt.Errorf("unary call %d: got %q, want %q", i, out.Value, want)
		}
	}
	return nil
}

// callCount has the server count to limit.
func callCount(ctx context.Context, cc *grpc.ClientConn, limit uint32) error {
	s, err := cc.NewStream(ctx, &desc.Streams[0], methodCount)
	if err != nil {
		return fmt.Errorf("server stream: %w", err)
	}
	stream := &grpc.GenericClientStream[number, number]{ClientStream: s}
	if err := errors.Join(stream.ClientStream.SendMsg(wrapperspb.UInt32(limit)), stream.CloseSend()); err != nil {
		return fmt.Errorf("server stream: %w", err)
	}
	for want := uint32(1); ; want++ {
		got, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && want == limit+1:
			return nil
		case err != nil:
			return fmt.Errorf("server stream, number %d: %w", want, err)
		case got.Value != want:
			return fmt.Errorf("server stream: got %d, want %d", got.Value, want)
		}
	}
}

// callSum sends 1, 2, 3 ... limit while it reads the totals that come back.
func callSum(ctx context.Context, cc *grpc.ClientConn, limit uint32) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the sender if we leave early
	s, err := cc.NewStream(ctx, &desc.Streams[1], methodSum)
	if err != nil {
		return fmt.Errorf("bidirectional stream: %w", err)
	}
	stream := &grpc.GenericClientStream[number, number]{ClientStream: s}
	sent := make(chan error, 1)
	go func() {
		for i := range limit {
			if err := stream.Send(wrapperspb.UInt32(i + 1)); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()

	var total uint32
	for i := range limit {
		total += i + 1
		got, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("bidirectional stream, number %d: %w", i+1, err)
		}
		if got.Value != total {
			return fmt.Errorf("bidirectional stream: got %d, want %d", got.Value, total)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("bidirectional stream: got %v instead of its end", err)
	}
	return <-sent
}
